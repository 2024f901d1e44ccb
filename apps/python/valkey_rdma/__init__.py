"""Large values in Valkey over RDMA, received into and sent from your own buffers.

The server is an unmodified Valkey. :class:`Client` blocks, :class:`AsyncClient` is for asyncio. Both connect over RDMA and TCP,
and to a small store inside the process, for trying out.
"""

from ._native import Client, Counts, __version__, serve_embedded
from .aio import AsyncClient
from .errors import (
    Closed,
    CommandTimeout,
    ConnectError,
    ConnectionLost,
    Error,
    Refused,
    RegistrationError,
    ValueTooLong,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Closed",
    "CommandTimeout",
    "ConnectError",
    "ConnectionLost",
    "Counts",
    "Error",
    "Refused",
    "RegistrationError",
    "ValueTooLong",
    "__version__",
    "serve_embedded",
]
