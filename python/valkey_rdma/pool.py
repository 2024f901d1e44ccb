"""Several connections to one server, and jobs that are done on whichever is free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from ._native import Client, Counts
from .errors import ConnectionLost

if TYPE_CHECKING:
    from typing_extensions import Buffer

R = TypeVar("R")


class _Batch(Generic[R]):
    """Results of jobs that were given together, and who wants to know when all are there."""

    def __init__(self, length: int, done: Callable[[list[R | Exception]], None]) -> None:
        self._results: list[R | Exception] = [ConnectionLost("the pool was closed")] * length
        self._left = length
        self._done = done
        self._lock = threading.Lock()

    def put(self, number: int, result: R | Exception) -> None:
        with self._lock:
            self._results[number] = result
            self._left -= 1
            ended = self._left == 0
        if ended:
            self._done(self._results)


class Pool:
    """Connections to one server, each with a thread of its own, which share what is registered.

    A job whose connection is lost is done once more on a new one, so it should be one that can be repeated: getting, setting, deleting.
    """

    def __init__(self, url: str, connections: int, *, timeout: float | None, window: int) -> None:
        """Connect.

        Args:
            url: As of :class:`Client`.
            connections: How many, at least one.
            timeout: As of :class:`Client`.
            window: As of :class:`Client`.

        Raises:
            ConnectError: One of the connections cannot be made.
        """
        first = Client(url, timeout=timeout, window=window)
        self._clients = [first, *(first.another() for _ in range(connections - 1))]
        self._jobs: SimpleQueue[tuple[Callable[[Client], object], _Batch[object], int] | None] = SimpleQueue()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=[number], name=f"valkey-rdma {number}", daemon=True)
            for number in range(connections)
        ]
        for thread in self._threads:
            thread.start()

    def register(self, buffer: Buffer) -> None:
        """Register a buffer for all connections; see :meth:`Client.register`."""
        self._clients[0].register(buffer)

    def submit(
        self, jobs: Sequence[Callable[[Client], R]], done: Callable[[list[R | Exception]], None]
    ) -> None:
        """Have jobs done, on several connections at once.

        Args:
            jobs: Called with a client each, in a thread of the pool.
            done: Called in such a thread with what the jobs returned or raised, in their order, once all have ended; at once, in this
                one, if there are none.
        """
        batch = _Batch(len(jobs), done)
        if not jobs:
            done([])
        for number, job in enumerate(jobs):
            self._jobs.put((job, batch, number))  # type: ignore[arg-type]

    @property
    def counts(self) -> list[Counts]:
        """Counts of each connection since it was made."""
        return [client.counts for client in self._clients]

    def close(self) -> None:
        """End what is under way, give up what is not begun (:class:`ConnectionLost`), and close the connections."""
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()

    def _work(self, number: int) -> None:
        while (next_job := self._jobs.get()) is not None:
            job, batch, place = next_job
            try:
                result = self._do(number, job)
            except Exception as error:
                result = error
            # Buffers of a job are the caller's when its batch is done.
            del job, next_job
            batch.put(place, result)
            del batch, result

    def _do(self, number: int, job: Callable[[Client], object]) -> object:
        if self._closing:
            raise ConnectionLost("the pool was closed")
        try:
            return job(self._clients[number])
        except ConnectionLost:
            self._clients[number] = self._clients[number].another()
            return job(self._clients[number])
