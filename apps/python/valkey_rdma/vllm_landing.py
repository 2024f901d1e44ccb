"""A secondary tier of vLLM's KV offloading: chunks in a Valkey or a cluster, moved between it and vLLM's CPU tier without copies.

vLLM 0.33.0 loads it as an external tier; this interface is experimental. This module is the only one of the package that imports vLLM. ::

    "secondary_tiers": [{"type": "LandingTierManager", "module_path": "valkey_rdma.vllm_landing",
                         "url": "valkey+cluster://192.0.2.1:6379,192.0.2.2:6379", "ttl_seconds": 3600}]

The key of a chunk contains a hash of everything that determines its format: model, types, groups, parallelism, layout of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import threading
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import Locality, LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ._native import Client
from .errors import Error
from .pool import Pool

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext

logger = logging.getLogger(__name__)

# The key of a chunk in Valkey, and its bytes.
Part = tuple[str, memoryview]


class LandingLookup(AsyncLookupManager):
    """Looks up chunks, in a thread of vLLM."""

    def __init__(self, tier: LandingTierManager, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Return for each key whether it exists."""
        return self._tier.present(keys)


class LandingTierManager(SecondaryTierManager):
    """A tier on a :class:`~valkey_rdma.pool.Pool`. The primary tier's memory is registered once, for all connections."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        url: str,
        connections: int = 4,
        timeout: float = 60.0,
        window: int = 1 << 20,
        key_prefix: str = "vllm",
        ttl_seconds: float | None = None,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        """Connect, and register the primary tier's memory.

        Args:
            offloading_spec: vLLM's settings.
            primary_kv_view: The primary tier's memory, a chunk in each row.
            tier_type: The name of the tier.
            url: As of :class:`Client`.
            connections: Connections, in a cluster to each node, each with a thread.
            timeout: Seconds that a command, of many chunks at once, may take.
            window: Bytes of a receive window.
            key_prefix: Prefix of each key, followed by a slash.
            ttl_seconds: A chunk's lifetime after it was stored; None has no limit.
            locality: The server's place in vLLM's events: LOCAL or REMOTE.
            backpressure_detector: vLLM's.

        Raises:
            ConnectError: The server cannot be reached.
            RegistrationError: The memory cannot be registered; the message names the limit.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._prefix = f"{key_prefix}/{layout(offloading_spec)}"
        self._bytes = primary_kv_view.cast("B")
        self._connections = connections
        self._ttl = ttl_seconds
        # A key names its chunk, so storing it twice stores the same bytes.
        self._pool = Pool(url, connections, timeout=timeout, window=window, repeats=True)
        try:
            if (reason := self._pool.no_rdma) is not None:
                logger.warning("%s is reached over TCP: %s", self._pool.url, reason)
            self._pool.register(self._bytes)
            self._lookups = LandingLookup(self, tier_type)
        except BaseException:
            self._pool.close()
            raise
        # The results of ended jobs, each with the keys that were not loaded.
        self._ended: SimpleQueue[tuple[JobResult, list[OffloadKey]]] = SimpleQueue()
        self._running = 0
        self._idle = threading.Condition()

    def name(self, key: OffloadKey) -> str:
        """Return the key of a chunk in Valkey."""
        return f"{self._prefix}/{key.hex()}"

    def present(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether it exists."""
        names = [self.name(key) for key in keys]
        return self._pool.call(lambda client: client.present(*names)) if names else []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk exists, or RETRY before that is known."""
        there = self._lookups.lookup(key, req_context)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks from their place in the primary tier."""
        self._submit(job_metadata, functools.partial(_set, ttl=self._ttl), lambda done, _part: done is None)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks into their place in the primary tier."""
        self._submit(job_metadata, _get, lambda done, part: done == part[1].nbytes)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        ended: list[JobResult] = []
        while True:
            try:
                result, missed = self._ended.get_nowait()
            except Empty:
                return ended
            # An earlier lookup has found these keys; they are gone.
            self._lookups.mark_miss(missed)
            ended.append(result)

    def drain_jobs(self) -> None:
        """Wait until no job uses the primary tier's memory."""
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Treat all requests alike."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Drop the results of a request's lookups."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Start the lookups of this step."""
        self._lookups.flush()

    def shutdown(self) -> None:
        """Wait for running jobs, give up the others, and deregister the primary tier's memory."""
        self._lookups.shutdown()
        self._pool.close()
        self._bytes.release()

    def _submit(self, job: TransferJob, do: Any, is_done: Any) -> None:
        keys, size = list(job.keys), self.block_size_bytes
        chunks = [self._bytes[int(chunk) * size : (int(chunk) + 1) * size] for chunk in job.chunk_ids]
        parts = [(self.name(key), chunk) for key, chunk in zip(keys, chunks, strict=True)]
        share = max(1, -(-len(parts) // self._connections))
        slices = [parts[start : start + share] for start in range(0, len(parts), share)]
        with self._idle:
            self._running += 1

        def done(results: list[Any]) -> None:
            each: list[Any] = []
            for result, part in zip(results, slices, strict=True):
                each += [result] * len(part) if isinstance(result, BaseException) else result
            good = [is_done(one, part) for one, part in zip(each, parts, strict=True)]
            for one, ended_well in zip(each, good, strict=True):
                if not ended_well:
                    logger.warning("a chunk was not %s: %s", "loaded" if job.is_promotion else "stored", one)
            # No view of the primary tier's memory is left when the job has ended.
            bytes_moved = sum(good) * size
            each.clear()
            for chunk in chunks:
                chunk.release()
            missed = [key for key, ended_well in zip(keys, good, strict=True) if not ended_well]
            moved = [key for key, ended_well in zip(keys, good, strict=True) if ended_well]
            result = JobResult(
                job_id=job.job_id,
                success=not missed,
                successful_keys=tuple(moved) if missed and moved and job.is_promotion else None,
                transfer_bytes=bytes_moved,
            )
            self._ended.put((result, missed if job.is_promotion else []))
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

        self._pool.submit([functools.partial(do, part) for part in slices], done)


def layout(spec: OffloadingSpec) -> str:
    """Return a hash of everything that determines the format of a chunk."""
    config = spec.config
    # In a layout that is independent of the workers, all of them write the same bytes.
    anywhere = config.parallel.is_parallelism_agnostic or config.replicated_layout
    parallel = None if anywhere else dataclasses.replace(config.parallel, data_parallel_index=0)
    facts = (
        config.model.name,
        config.model.dtype,
        config.groups,
        config.cache,
        config.worker_kv_bytes_per_block,
        config.replicated_layout,
        config.canonical_layout,
        config.kv_cache_layout,
        parallel,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _set(parts: Sequence[Part], client: Client, ttl: float | None) -> list[Error | None]:
    return client.mset_from(parts, ttl=ttl)


def _get(parts: Sequence[Part], client: Client) -> list[int | Error | None]:
    return client.mget_into(parts)
