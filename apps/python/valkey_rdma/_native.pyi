from collections.abc import Iterable
from types import TracebackType
from typing import Self, final

from typing_extensions import Buffer

from .errors import Error

__all__ = ["Client", "Counts", "__version__", "forks", "serve_embedded"]
__version__: str

@final
class Counts:
    """Counts of bytes landed, lent and copied."""

    @property
    def bytes_landed(self) -> int:
        """Bytes that the server wrote into registered buffers itself."""

    @property
    def bytes_lent(self) -> int:
        """Bytes that the device sent from registered buffers."""

    @property
    def bytes_copied(self) -> int:
        """Bytes that this side copied, in either direction."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Client:
    """A client for large values: one connection, or in a cluster one to each primary."""

    def __new__(
        cls,
        url: str,
        *,
        timeout: float | None = 60.0,
        connect_timeout: float = 5.0,
        window: int = 1048576,
        repeats: bool = False,
    ) -> Self: ...
    def another(self) -> Self:
        """Connect again to the same server; what is registered serves both."""

    def register(self, buffer: Buffer, *, slice_length: int | None = None) -> None:
        """Register a writable buffer, so that values land in it and are sent from it without a copy."""

    def unregister(self, buffer: Buffer) -> None:
        """Undo `register()`."""

    def get_into(self, key: bytes | str, buffer: Buffer) -> int | None:
        """Get a value into a buffer. Returns its length; None if there is no such key."""

    def get(self, key: bytes | str) -> bytes | None:
        """Get a value as new bytes, which is a copy; None if there is no such key."""

    def mget_into(self, parts: Iterable[tuple[bytes | str, Buffer]]) -> list[int | Error | None]:
        """Get many values, each into a buffer of its own; commands are sent ahead of the replies."""

    def set_from(self, key: bytes | str, buffer: Buffer, *, ttl: float | None = None) -> None:
        """Set a key to the bytes of a buffer, with a lifetime of `ttl` seconds."""

    def set(self, key: bytes | str, value: Buffer | str, *, ttl: float | None = None) -> None:
        """Set a key to a str, which is encoded in UTF-8, or to the bytes of a buffer."""

    def mset_from(
        self, parts: Iterable[tuple[bytes | str, Buffer]], *, ttl: float | None = None
    ) -> list[Error | None]:
        """Set many keys, each to the bytes of a buffer of its own; commands are sent ahead of the replies."""

    def exists(self, *keys: bytes | str) -> int:
        """Return how many of these keys exist."""

    def present(self, *keys: bytes | str) -> list[bool]:
        """Return for each key whether it exists."""

    def delete(self, *keys: bytes | str) -> int:
        """Delete keys. Returns how many existed."""

    def strlen(self, key: bytes | str) -> int:
        """Return the length of a value in bytes, 0 if there is no such key."""

    def node_memory(self) -> dict[str, dict[str, int]]:
        """Return how much memory each node uses: `used_memory` and `maxmemory` by the node's address."""

    @property
    def counts(self) -> Counts:
        """Counts of bytes landed, lent and copied, as of the last command that has ended."""

    @property
    def routing(self) -> dict[str, int] | None:
        """Counts of a cluster's redirections; None if the server is not a cluster."""

    @property
    def lost(self) -> bool:
        """Whether the connection is lost, so that no further command is sent on it."""

    @property
    def transport(self) -> str | None:
        """The transport: `rdma`, `tcp` or `embedded`. None after `close()`."""

    @property
    def no_rdma(self) -> str | None:
        """Why a client of `valkey://` does not use RDMA. None if it does, and for other addresses."""

    @property
    def url(self) -> str:
        """The address of the server, without the user and the password."""

    @property
    def registrations(self) -> int:
        """How many buffers are registered."""

    def close(self) -> None:
        """Close the connection, after the running command. In a forked child this has no effect."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

def forks() -> int:
    """How many forks there were between the process that imported this module and this one."""

def serve_embedded(name: str) -> str:
    """Serve the store `embedded://NAME` over TCP as well. Returns its address."""
