"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from ._native import Client, Counts, forks
from .errors import FORKED, Closed, Error

if TYPE_CHECKING:
    from typing_extensions import Buffer

R = TypeVar("R")


class AsyncClient:
    """A :class:`Client` for asyncio, with its methods as coroutines. ``await AsyncClient.connect(url)`` creates one.

    Commands of several tasks run one after the other, in a thread of the client. While one waits, the event loop runs.

    When the ``await`` of a command has ended, by a result, an error or a cancellation, the buffer is the caller's again. A task that
    is cancelled before its command began sends nothing. One that is cancelled later ends when the command does, at most ``timeout``
    after its beginning. The reply is read, so the client can be used further.
    """

    def __init__(self, client: Client) -> None:
        """Wrap a client, which the caller must not use further; ``close()`` closes it."""
        self._client = client
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="valkey-rdma")
        # A forked child has no such thread.
        self._forks = forks()
        # None until close() is called.
        self._closing: Future[None] | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        timeout: float | None = 60.0,
        connect_timeout: float = 5.0,
        window: int = 1048576,
        repeats: bool = False,
    ) -> Self:
        """Connect to a server; the arguments are those of :class:`Client`."""
        return cls(
            await asyncio.to_thread(
                Client,
                url,
                timeout=timeout,
                connect_timeout=connect_timeout,
                window=window,
                repeats=repeats,
            )
        )

    async def another(self) -> Self:
        """Connect again; see :meth:`Client.another`."""
        return type(self)(await self._do(self._client.another))

    async def register(self, buffer: Buffer, *, slice_length: int | None = None) -> None:
        """Register a buffer; see :meth:`Client.register`."""
        await self._do(functools.partial(self._client.register, slice_length=slice_length), buffer)

    async def unregister(self, buffer: Buffer) -> None:
        """Undo :meth:`register`; see :meth:`Client.unregister`."""
        await self._do(self._client.unregister, buffer)

    async def get_into(self, key: bytes | str, buffer: Buffer) -> int | None:
        """Get a value into a buffer; see :meth:`Client.get_into`."""
        # The view holds the buffer from now on; the thread may begin the command later.
        with memoryview(buffer) as view:
            return await self._do(self._client.get_into, key, view)

    async def get(self, key: bytes | str) -> bytes | None:
        """Get a value as new bytes; see :meth:`Client.get`."""
        return await self._do(self._client.get, key)

    async def mget_into(self, parts: Iterable[tuple[bytes | str, Buffer]]) -> list[int | Error | None]:
        """Get many values; see :meth:`Client.mget_into`."""
        with contextlib.ExitStack() as views:
            held = [(key, views.enter_context(memoryview(buffer))) for key, buffer in parts]
            return await self._do(self._client.mget_into, held)

    async def set_from(self, key: bytes | str, buffer: Buffer, *, ttl: float | None = None) -> None:
        """Set a key to the bytes of a buffer; see :meth:`Client.set_from`."""
        with memoryview(buffer) as view:
            await self._do(functools.partial(self._client.set_from, ttl=ttl), key, view)

    async def set(self, key: bytes | str, value: Buffer | str, *, ttl: float | None = None) -> None:
        """Set a key to a str or bytes; see :meth:`Client.set`."""
        await self.set_from(key, value.encode() if isinstance(value, str) else value, ttl=ttl)

    async def mset_from(
        self, parts: Iterable[tuple[bytes | str, Buffer]], *, ttl: float | None = None
    ) -> list[Error | None]:
        """Set many keys; see :meth:`Client.mset_from`."""
        with contextlib.ExitStack() as views:
            held = [(key, views.enter_context(memoryview(buffer))) for key, buffer in parts]
            return await self._do(functools.partial(self._client.mset_from, ttl=ttl), held)

    async def exists(self, *keys: bytes | str) -> int:
        """Return how many of these keys exist; see :meth:`Client.exists`."""
        return await self._do(self._client.exists, *keys)

    async def present(self, *keys: bytes | str) -> list[bool]:
        """Return for each key whether it exists; see :meth:`Client.present`."""
        return await self._do(self._client.present, *keys)

    async def delete(self, *keys: bytes | str) -> int:
        """Delete keys; see :meth:`Client.delete`."""
        return await self._do(self._client.delete, *keys)

    async def strlen(self, key: bytes | str) -> int:
        """Return the length of a value; see :meth:`Client.strlen`."""
        return await self._do(self._client.strlen, key)

    async def node_memory(self) -> dict[str, dict[str, int]]:
        """Return how much memory each node uses; see :meth:`Client.node_memory`."""
        return await self._do(self._client.node_memory)

    @property
    def counts(self) -> Counts:
        """Counts of bytes landed, lent and copied, as of the last command that has ended."""
        return self._client.counts

    @property
    def routing(self) -> dict[str, int] | None:
        """Counts of a cluster's redirections; see :attr:`Client.routing`."""
        return self._client.routing

    @property
    def lost(self) -> bool:
        """Whether the connection is lost; see :attr:`Client.lost`."""
        return self._client.lost

    @property
    def transport(self) -> str | None:
        """The transport; see :attr:`Client.transport`."""
        return self._client.transport

    @property
    def no_rdma(self) -> str | None:
        """Why a client of ``valkey://`` does not use RDMA; see :attr:`Client.no_rdma`."""
        return self._client.no_rdma

    @property
    def registrations(self) -> int:
        """How many buffers are registered; see :attr:`Client.registrations`."""
        return self._client.registrations

    async def close(self) -> None:
        """Close the connection, after the commands that were submitted before. Later commands raise :class:`Closed`.

        A second call waits for the end of the first. If a call is cancelled, the connection is closed all the same. In a forked child this
        has no effect.
        """
        if forks() != self._forks:
            return
        if self._closing is None:
            self._closing = self._thread.submit(self._client.close)
            self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(self._closing))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<valkey_rdma.AsyncClient on {self._client!r}>"

    async def _do(self, call: Callable[..., R], *arguments: object) -> R:
        if forks() != self._forks:
            raise Closed(FORKED)
        if self._closing is not None:
            raise Closed("the client was closed")
        command = self._thread.submit(call, *arguments)
        ended = asyncio.wrap_future(command)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            # A command that has begun uses the buffer until it ends, however often the task is cancelled.
            if not command.cancel():
                while not ended.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([ended])
                ended.exception()
            raise
        return ended.result()
