"""The exceptions of a client. All are :class:`Error`; each says whether the client can be used further."""

# The text of the errors of what has threads of its own.
FORKED = "this process is a forked child, and this belongs to its parent: make another one here"


class Error(Exception):
    """Any error of this package."""


class ConnectError(Error, ConnectionError):
    """Connecting failed: no RDMA device, no such host, nothing listens there, or it took too long."""


class RegistrationError(Error, OSError):
    """A buffer cannot be registered; the message names the limit. The client can be used further."""


class Refused(Error):
    """The server refused the command: a wrong type, missing rights, a full memory. The client can be used further."""


class ValueTooLong(Error):
    """The value is longer than the buffer. It was read and dropped, and the client can be used further.

    Attributes:
        length: Bytes of the value.
        room: Bytes of the buffer.
    """

    def __init__(self, length: int, room: int) -> None:
        super().__init__(length, room)
        self.length = length
        self.room = room

    def __str__(self) -> str:
        return f"the value has {self.length} bytes, and the buffer {self.room}"


class ConnectionLost(Error, ConnectionError):
    """The connection ended. The server may have carried out the command. :meth:`Client.another` connects again."""


class CommandTimeout(ConnectionLost, TimeoutError):
    """The command took longer than the client's ``timeout``. The connection is lost."""


class Closed(Error):
    """The program has closed the client or the pool. No connection was lost: another attempt fails in the same way."""
