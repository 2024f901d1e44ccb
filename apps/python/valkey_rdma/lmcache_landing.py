"""An L2 adapter of LMCache: KV caches in a Valkey or a cluster, moved between it and LMCache's L1 memory without copies.

LMCache loads it by its plugin entry. This module is the only one of the package that imports LMCache (0.5.6). ::

    --l2-adapter '{"type": "plugin", "module_path": "valkey_rdma.lmcache_landing", "class_name": "LandingL2Adapter",
                   "adapter_params": {"url": "valkey+cluster://192.0.2.1:6379,192.0.2.2:6379", "ttl_seconds": 3600}}'

The server needs no module: values land in windows of Valkey's own RDMA protocol. LMCache's own ``valkey_rdma`` adapter is a different
one, for the large-object module. Keys have the format of LMCache's ``resp`` and ``valkey`` adapters, with the prefix of the latter. So
all three can use one cache.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from ._native import Client
from .errors import Error
from .pool import Pool

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

logger = init_logger(__name__)

R = TypeVar("R")
# The key of an object in Valkey, and its bytes.
Part = tuple[str, memoryview]


class LandingL2AdapterConfig(L2AdapterConfigBase):
    """Settings of the adapter, the ``adapter_params`` of LMCache's plugin entry."""

    def __init__(
        self,
        url: str,
        connections: int = 4,
        timeout: float = 60.0,
        window: int = 1 << 20,
        key_prefix: str = "",
        ttl_seconds: float | None = None,
        max_capacity_gb: float = 0,
    ) -> None:
        super().__init__()
        self.url = url
        self.connections = connections
        self.timeout = timeout
        self.window = window
        self.key_prefix = key_prefix
        self.ttl_seconds = ttl_seconds
        self.max_capacity_gb = max_capacity_gb

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> LandingL2AdapterConfig:
        """Check settings from JSON, and return them."""
        known = {"url", "connections", "timeout", "window", "key_prefix", "ttl_seconds", "max_capacity_gb"}
        if unknown := set(d) - known:
            raise ValueError(
                f"unknown settings: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
            )
        if not isinstance(d.get("url"), str):
            raise ValueError(
                "url must be a string, such as valkey://HOST[:PORT] or rdma+cluster://HOST[:PORT],…"
            )
        prefix = d.get("key_prefix", "")
        if not isinstance(prefix, str) or not set(prefix).isdisjoint("@{}"):
            raise ValueError("key_prefix must be a string without @, { and }")
        for name in ["connections", "window"]:
            if name in d and (type(d[name]) is not int or d[name] <= 0):
                raise ValueError(f"{name} must be an integer above 0")
        for name in ["timeout", "ttl_seconds"]:
            if d.get(name) is not None and (type(d[name]) not in (int, float) or d[name] <= 0):
                raise ValueError(f"{name} must be a number above 0")
        capacity = d.get("max_capacity_gb", 0)
        if type(capacity) not in (int, float) or capacity < 0:
            raise ValueError("max_capacity_gb must be a number that is not negative")
        return cls(**d)

    @classmethod
    def help(cls) -> str:
        """Describe the settings, for LMCache's command line."""
        return (
            "Valkey with landing windows, L2 adapter config fields:\n"
            "- url (str): valkey://HOST[:PORT], rdma:// or tcp://; valkey+cluster:// and so on for a cluster (required)\n"
            "- connections (int): connections, or sets of them to each node, each with a thread (default 4, >0)\n"
            "- timeout (float): seconds that a command, of many objects at once, may take (default 60, >0)\n"
            "- window (int): bytes of a receive window (default 1048576, >0)\n"
            "- key_prefix (str): prefix of each key, followed by @ (default empty)\n"
            "- ttl_seconds (float): lifetime of an object after it was stored (default no limit, >0)\n"
            "- max_capacity_gb (float): capacity in GB for usage tracking and eviction (default 0 = disabled)"
        )


class LandingL2Adapter(L2AdapterInterface):
    """LMCache's L2 interface on a :class:`~valkey_rdma.pool.Pool`. The L1 arena is registered once, for all connections.

    Locks are local to the process. :meth:`delete` skips locked keys. If the server evicted a key, or another client deleted it, a load
    reports it as not loaded.
    """

    def __init__(
        self,
        config: LandingL2AdapterConfig,
        l1_memory_desc: L1MemoryDesc | None = None,
        **_others: object,
    ) -> None:
        """Connect, and register the L1 arena.

        Raises:
            ConnectError: The server cannot be reached.
            RegistrationError: The arena cannot be registered; the message names the limit.
        """
        super().__init__(max_capacity_bytes=int(config.max_capacity_gb * (1 << 30)))
        self._config = config
        # A key names its object, so storing it twice stores the same bytes. A deletion that comes late costs a load.
        self._pool = Pool(
            config.url, config.connections, timeout=config.timeout, window=config.window, repeats=True
        )
        if (reason := self._pool.no_rdma) is not None:
            logger.warning("%s is reached over TCP: %s", self._pool.url, reason)
        if l1_memory_desc is None:
            logger.warning("no L1 arena was given: stored and loaded objects are copied once")
        else:
            try:
                arena = (ctypes.c_ubyte * l1_memory_desc.size).from_address(l1_memory_desc.ptr)
                self._pool.register(arena)
            except BaseException:
                self._pool.close()
                raise
        self._store_event = create_event_notifier()
        self._lookup_event = create_event_notifier()
        self._load_event = create_event_notifier()
        # The lock protects everything below.
        self._lock = threading.Lock()
        self._last_task: L2TaskId = 0
        self._stored: dict[L2TaskId, L2StoreResult] = {}
        self._found: dict[L2TaskId, Bitmap] = {}
        self._loaded: dict[L2TaskId, Bitmap] = {}
        self._locks: dict[ObjectKey, int] = {}
        # Bytes of each key that this adapter has stored, so that a key is counted once.
        self._sizes: dict[ObjectKey, int] = {}
        self._totals = dict.fromkeys(
            [
                "stored_objects",
                "stored_bytes",
                "failed_stores",
                "looked_up_objects",
                "found_objects",
                "loaded_objects",
                "loaded_bytes",
                "missed_loads",
                "deleted_objects",
            ],
            0,
        )
        self._closed = False

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is signalled when a store has ended."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is signalled when a lookup has ended."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is signalled when a load has ended."""
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Store objects from their place in L1 memory."""
        task = self._next_task()
        keys = list(keys)
        parts = [
            (self._name(key), memoryview(one.byte_array)) for key, one in zip(keys, objects, strict=True)
        ]
        slices = self._slices(parts)

        def done(results: list[list[Error | None] | BaseException]) -> None:
            stored = []
            for (key, (_, view)), error in zip(
                zip(keys, parts, strict=True), flat(results, slices), strict=True
            ):
                if error is None:
                    stored.append((key, view.nbytes))
                else:
                    logger.warning("not stored: %s", error)
            with self._lock:
                # A key that is stored again takes no further room.
                sizes = [0 if key in self._sizes else size for key, size in stored]
                self._sizes.update(stored)
                self._totals["stored_objects"] += len(stored)
                self._totals["stored_bytes"] += sum(size for _, size in stored)
                self._totals["failed_stores"] += len(keys) - len(stored)
                self._stored[task] = L2StoreResult(len(stored) == len(keys), sum(sizes))
            # Before the event, because this updates the usage. The event follows even if a listener raises.
            try:
                if stored:
                    self._notify_keys_stored([key for key, _ in stored], sizes)
            finally:
                self._signal(self._store_event)

        ttl = self._config.ttl_seconds
        self._pool.submit([functools.partial(_set, part, ttl) for part in slices], done)
        return task

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """Return the stores that have ended since the last call."""
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Look up keys, and lock those that exist."""
        task = self._next_task()
        keys = list(keys)

        def done(results: list[list[bool] | BaseException]) -> None:
            bitmap = Bitmap(len(keys))
            found = results[0]
            if isinstance(found, BaseException):
                logger.warning("not looked up: %s", found)
                found = []
            with self._lock:
                self._totals["looked_up_objects"] += len(keys)
                self._totals["found_objects"] += sum(found)
                for number, key in enumerate(keys):
                    if number < len(found) and found[number]:
                        bitmap.set(number)
                        self._locks[key] = self._locks.get(key, 0) + 1
                self._found[task] = bitmap
            self._signal(self._lookup_event)

        self._pool.submit([functools.partial(_present, [self._name(key) for key in keys])], done)
        return task

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return once which keys exist and are locked now; None before the lookup has ended."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Undo one lock of each key."""
        with self._lock:
            for key in keys:
                left = self._locks.pop(key, 0) - 1
                if left > 0:
                    self._locks[key] = left

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Load objects into their place in L1 memory."""
        task = self._next_task()
        keys = list(keys)
        parts = [
            (self._name(key), memoryview(one.byte_array)) for key, one in zip(keys, objects, strict=True)
        ]
        slices = self._slices(parts)

        def done(results: list[list[int | Error | None] | BaseException]) -> None:
            bitmap = Bitmap(len(keys))
            loaded, size = [], 0
            for number, length in enumerate(flat(results, slices)):
                if length == parts[number][1].nbytes:
                    bitmap.set(number)
                    loaded.append(keys[number])
                    size += parts[number][1].nbytes
                elif isinstance(length, BaseException):
                    logger.warning("not loaded: %s", length)
            with self._lock:
                self._totals["loaded_objects"] += len(loaded)
                self._totals["loaded_bytes"] += size
                self._totals["missed_loads"] += len(keys) - len(loaded)
                self._loaded[task] = bitmap
            try:
                if loaded:
                    self._notify_keys_accessed(loaded)
            finally:
                self._signal(self._load_event)

        self._pool.submit([functools.partial(_get, part) for part in slices], done)
        return task

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return once which objects are loaded; None before the load has ended."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete keys that are not locked, and wait for the reply."""
        with self._lock:
            free = [key for key in keys if key not in self._locks]
        if not free:
            return
        try:
            deleted = self._pool.call(functools.partial(_delete, [self._name(key) for key in free]))
        except Exception as error:
            logger.warning("not deleted: %s", error)
            return
        with self._lock:
            self._totals["deleted_objects"] += deleted
            gone = [(key, self._sizes.pop(key)) for key in free if key in self._sizes]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])

    def report_status(self) -> dict[str, Any]:
        """Return the server, the transport, and counts since the adapter was created."""
        counts = self._pool.counts
        usage = self.get_usage()
        with self._lock:
            totals = dict(self._totals)
        return {
            "is_healthy": not self._closed,
            "type": type(self).__name__,
            "url": self._pool.url,
            "transport": self._pool.transport,
            "no_rdma": self._pool.no_rdma,
            "routing": self._pool.routing,
            "key_prefix": self._config.key_prefix,
            "ttl_seconds": self._config.ttl_seconds,
            "connections": len(counts),
            "bytes_landed": sum(count.bytes_landed for count in counts),
            "bytes_lent": sum(count.bytes_lent for count in counts),
            "bytes_copied": sum(count.bytes_copied for count in counts),
            "node_memory": self._node_memory(),
            "current_size_bytes": usage.total_bytes_used,
            "max_capacity_bytes": usage.total_capacity_bytes,
            **totals,
        }

    def close(self) -> None:
        """Wait for running jobs, give up the others, and deregister the arena."""
        self._pool.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for event in [self._store_event, self._lookup_event, self._load_event]:
                event.close()

    def _signal(self, event: Any) -> None:
        with self._lock:
            # A task that is submitted after close() ends at once; its event has no descriptor.
            if not self._closed:
                event.notify()

    def _node_memory(self) -> dict[str, dict[str, int]]:
        """Return how much memory each node uses; empty if a node cannot be reached."""
        try:
            return self._pool.call(Client.node_memory)
        except Exception as error:
            logger.warning("the memory of nodes is not known: %s", error)
            return {}

    def _name(self, key: ObjectKey) -> str:
        return name(key, self._config.key_prefix)

    def _slices(self, parts: list[Part]) -> list[list[Part]]:
        """Cut a batch into one pipeline for each connection."""
        share = max(1, -(-len(parts) // self._config.connections))
        return [parts[start : start + share] for start in range(0, len(parts), share)]

    def _next_task(self) -> L2TaskId:
        with self._lock:
            self._last_task += 1
            return self._last_task


def name(key: ObjectKey, prefix: str = "") -> str:
    """Return the key of an object in Valkey, in the format of LMCache's own adapters."""
    text = f"{prefix}@" if prefix else ""
    text += f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
    return f"{text}@{key.cache_salt}" if key.cache_salt else text


def flat(results: Sequence[Sequence[R] | BaseException], slices: list[list[Part]]) -> list[R | BaseException]:
    """Return the result of each part. The exception of a failed job is that of all its parts."""
    each: list[R | BaseException] = []
    for result, parts in zip(results, slices, strict=True):
        each += [result] * len(parts) if isinstance(result, BaseException) else result
    return each


def _set(parts: Sequence[Part], ttl: float | None, client: Client) -> list[Error | None]:
    return client.mset_from(parts, ttl=ttl)


def _get(parts: Sequence[Part], client: Client) -> list[int | Error | None]:
    return client.mget_into(parts)


def _present(keys: Sequence[str], client: Client) -> list[bool]:
    return client.present(*keys) if keys else []


def _delete(keys: Sequence[str], client: Client) -> int:
    return client.delete(*keys)
