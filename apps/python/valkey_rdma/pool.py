"""Several connections to one server or cluster, and jobs that are done on whichever is free."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from ._native import Client, Counts
from .errors import ConnectionLost

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

R = TypeVar("R")


class _Batch(Generic[R]):
    """Results of jobs that were given together, and what is called with them when all are there."""

    def __init__(self, length: int, done: Callable[[list[R | BaseException]], None]) -> None:
        self._results: list[R | BaseException] = [ConnectionLost("the pool was closed")] * length
        self._left = length
        self._done = done
        self._lock = threading.Lock()

    def put(self, number: int, result: R | BaseException) -> None:
        with self._lock:
            self._results[number] = result
            self._left -= 1
            ended = self._left == 0
        if ended:
            self._done(self._results)


class Pool:
    """Connections to one server or cluster, each with a thread of its own, which share what is registered.

    A job whose connection is lost is done once more on a new one, so it should be one that can be repeated: getting, setting, deleting.
    """

    def __init__(
        self, url: str, connections: int = 4, *, timeout: float | None = 60.0, window: int = 1048576
    ) -> None:
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
        self._lock = threading.Lock()
        # Nothing is put behind the Nones that close() puts into the queue of jobs: both are done under the lock.
        self._closing = False
        self._workers = [
            threading.Thread(target=self._work, args=[number], name=f"valkey-rdma {number}", daemon=True)
            for number in range(connections)
        ]
        # What `submit` is given to call has a thread of its own, so that it may wait for jobs.
        self._ended: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._notifier = threading.Thread(target=self._notify, name="valkey-rdma done", daemon=True)
        for thread in [*self._workers, self._notifier]:
            thread.start()

    @property
    def url(self) -> str:
        """The address of the server, without the user and the password."""
        return self._clients[0].url

    def register(self, buffer: Buffer, *, slice_length: int | None = None) -> None:
        """Register a buffer for all connections; see :meth:`Client.register`."""
        self._clients[0].register(buffer, slice_length=slice_length)

    def submit(
        self, jobs: Sequence[Callable[[Client], R]], done: Callable[[list[R | BaseException]], None]
    ) -> None:
        """Have jobs done, on several connections at once.

        Args:
            jobs: Called with a client each, in a thread of the pool.
            done: Called with what the jobs returned or raised, in their order, once all have ended: in a thread of the pool that does
                no jobs, one such call after the other. What it raises is logged. At once and in the thread of the caller if there are
                no jobs, or with a :class:`ConnectionLost` for each if the pool was closed.
        """

        def ended(results: list[R | BaseException]) -> None:
            self._ended.put(functools.partial(done, results))

        if not jobs or not self._queue(jobs, ended):
            done([ConnectionLost("the pool was closed") for _ in jobs])

    def call(self, job: Callable[[Client], R]) -> R:
        """Have one job done, and return what it returns or raise what it raises.

        It may be called in what ``submit`` is given as ``done``, but not in a job.

        Raises:
            ConnectionLost: The pool was closed.
        """
        ended: SimpleQueue[list[R | BaseException]] = SimpleQueue()
        if not self._queue([job], ended.put):
            raise ConnectionLost("the pool was closed")
        (result,) = ended.get()
        if isinstance(result, BaseException):
            raise result
        return result

    @property
    def counts(self) -> list[Counts]:
        """Counts of each connection since it was made."""
        return [client.counts for client in self._clients]

    @property
    def routing(self) -> dict[str, int] | None:
        """The sums of what :attr:`Client.routing` tells of each client."""
        each = [routing for client in self._clients if (routing := client.routing) is not None]
        return {name: sum(routing[name] for routing in each) for name in each[0]} if each else None

    @property
    def transport(self) -> str | None:
        """See :attr:`Client.transport`."""
        return self._clients[0].transport

    @property
    def no_rdma(self) -> str | None:
        """See :attr:`Client.no_rdma`."""
        return self._clients[0].no_rdma

    def close(self) -> None:
        """End what is under way, give up what is not begun (:class:`ConnectionLost`), and close the connections.

        Every ``done`` has been called when it returns. It must not be called in a ``done`` or in a job, which it waits for.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                for _ in self._workers:
                    self._jobs.put(None)
        for worker in self._workers:
            worker.join()
        self._ended.put(None)
        self._notifier.join()
        for client in self._clients:
            client.close()

    def _queue(
        self, jobs: Sequence[Callable[[Client], R]], ended: Callable[[list[R | BaseException]], None]
    ) -> bool:
        """Put jobs into the queue, unless the pool was closed; ``ended`` is called in the thread of the one that ends last."""
        batch = _Batch(len(jobs), ended)
        with self._lock:
            if self._closing:
                return False
            for number, job in enumerate(jobs):
                self._jobs.put((job, batch, number))  # type: ignore[arg-type]
        return True

    def _work(self, number: int) -> None:
        while (next_job := self._jobs.get()) is not None:
            job, batch, place = next_job
            try:
                result = self._do(number, job)
            except BaseException as error:
                # A panic of the native module is none of Exception, and whoever waits for the job is told of it, too.
                result = error
            # Buffers of a job are the caller's when its batch is done.
            del job, next_job
            batch.put(place, result)
            del batch, result

    def _notify(self) -> None:
        while (done := self._ended.get()) is not None:
            try:
                done()
            except Exception:
                logger.exception("what was to be called with the results of jobs has failed")
            # It holds the results.
            del done

    def _do(self, number: int, job: Callable[[Client], object]) -> object:
        if self._closing:
            raise ConnectionLost("the pool was closed")
        try:
            return job(self._clients[number])
        except ConnectionLost:
            self._clients[number] = self._clients[number].another()
            return job(self._clients[number])
