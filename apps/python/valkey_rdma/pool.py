"""A pool of connections to one server or cluster, which runs jobs on free connections."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from ._native import Client, Counts, forks
from .errors import FORKED, Closed, ConnectionLost

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

R = TypeVar("R")


class _Batch(Generic[R]):
    """The results of jobs that were submitted together, and the callback for all of them."""

    def __init__(self, length: int, done: Callable[[list[R | BaseException]], None]) -> None:
        self._results: list[R | BaseException] = [Closed("the pool was closed")] * length
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
    """Connections to one server or cluster, each with a thread of its own. They share registered buffers.

    If a connection is lost, its job gets :class:`ConnectionLost`, and the next job gets a new connection. With ``repeats``, the job
    runs once more on a new one. Say so only if jobs may be carried out twice, and late: the server may have the first command.
    """

    def __init__(
        self,
        url: str,
        connections: int = 4,
        *,
        timeout: float | None = 60.0,
        connect_timeout: float = 5.0,
        window: int = 1048576,
        repeats: bool = False,
    ) -> None:
        """Connect.

        Args:
            url: As of :class:`Client`.
            connections: How many, at least one.
            timeout: As of :class:`Client`.
            connect_timeout: As of :class:`Client`.
            window: As of :class:`Client`.
            repeats: Whether a job runs once more if its connection is lost, and as of :class:`Client`.

        Raises:
            ConnectError: A connection failed.
        """
        first = Client(url, timeout=timeout, connect_timeout=connect_timeout, window=window, repeats=repeats)
        self._repeats = repeats
        self._clients = [first, *(first.another() for _ in range(connections - 1))]
        # A forked child has no threads of the pool.
        self._forks = forks()
        self._jobs: SimpleQueue[tuple[Callable[[Client], object], _Batch[object], int] | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Set under the lock, with the Nones in the queue that end the workers. So no job is queued after them.
        self._closing = False
        self._workers = [
            threading.Thread(target=self._work, args=[number], name=f"valkey-rdma {number}", daemon=True)
            for number in range(connections)
        ]
        # Callbacks have a thread of their own, so they may wait for jobs.
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
        """Run jobs, on several connections at once.

        Args:
            jobs: Each is called with a client, in a thread of the pool.
            done: Called once, with what each job returned or raised, in the jobs' order, when all have ended. Calls are made one after
                the other, in a thread of the pool without jobs; their exceptions are logged. If there are no jobs, or the pool is
                closed, it is called at once in the caller's thread. After a close, each result is a :class:`Closed`.
        """

        def ended(results: list[R | BaseException]) -> None:
            self._ended.put(functools.partial(done, results))

        if not jobs or not self._queue(jobs, ended):
            done([self._refused() for _ in jobs])

    def call(self, job: Callable[[Client], R]) -> R:
        """Run one job, and return what it returns or raise what it raises.

        A callback of ``submit`` may call this; a job must not.

        Raises:
            Closed: The pool is closed.
        """
        ended: SimpleQueue[list[R | BaseException]] = SimpleQueue()
        if not self._queue([job], ended.put):
            raise self._refused()
        (result,) = ended.get()
        if isinstance(result, BaseException):
            raise result
        return result

    @property
    def counts(self) -> list[Counts]:
        """The counts of each connection."""
        return [client.counts for client in self._clients]

    @property
    def routing(self) -> dict[str, int] | None:
        """The sum of :attr:`Client.routing` over all clients."""
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
        """Wait for running jobs, give up the others (:class:`Closed`), and close the connections.

        When it returns, every ``done`` has been called. A ``done`` or a job must not call this, because it waits for them. In a forked
        child this has no effect.
        """
        if forks() != self._forks:
            return
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
        """Queue jobs, unless the pool is closed or a parent's. The thread of the last job to end calls ``ended``."""
        if forks() != self._forks:
            return False
        batch = _Batch(len(jobs), ended)
        with self._lock:
            if self._closing:
                return False
            for number, job in enumerate(jobs):
                self._jobs.put((job, batch, number))  # type: ignore[arg-type]
        return True

    def _refused(self) -> Closed:
        return Closed("the pool was closed" if forks() == self._forks else FORKED)

    def _work(self, number: int) -> None:
        while (next_job := self._jobs.get()) is not None:
            job, batch, place = next_job
            try:
                result = self._do(number, job)
            except BaseException as error:
                # A panic of the native module is no Exception; the waiting caller gets it, too.
                result = error
            # No reference to the job's buffers is left when its batch is done.
            del job, next_job
            batch.put(place, result)
            del batch, result

    def _notify(self) -> None:
        while (done := self._ended.get()) is not None:
            try:
                done()
            except Exception:
                logger.exception("the callback for the results of jobs has failed")
            # The callback holds the results.
            del done

    def _do(self, number: int, job: Callable[[Client], object]) -> object:
        if self._closing:
            raise Closed("the pool was closed")
        try:
            return job(self._connected(number))
        except ConnectionLost:
            if not self._repeats:
                raise
            return job(self._connected(number))

    def _connected(self, number: int) -> Client:
        """Return the client of a worker, a new one if its connection was lost."""
        if self._clients[number].lost:
            self._clients[number] = self._clients[number].another()
        return self._clients[number]
