"""The adapter on LMCache's own interface. LMCache's own tests run on it by `apps/python/lmcache`.

With VALKEY_TEST_URL, on that server or cluster, over RDMA and TCP, instead of a store in the process.
"""

import json
import os
import select
from argparse import Namespace

import pytest
import redis
from conftest import WINDOW

torch = pytest.importorskip(
    "torch", reason="LMCache needs torch, which is large: apps/python/lmcache installs both"
)
pytest.importorskip("lmcache", reason="LMCache is not installed: apps/python/lmcache installs it")

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from valkey_rdma import Client, serve_embedded
from valkey_rdma.lmcache_landing import LandingL2Adapter, LandingL2AdapterConfig, name

REAL = os.environ.get("VALKEY_TEST_URL", "")
ELEMENTS = 256 << 10
COUNT = 6


class Arena:
    """L1 memory, as LMCache describes it, and objects in it."""

    def __init__(self):
        self.tensor = torch.zeros(2 * COUNT * ELEMENTS, dtype=torch.float32)

    def description(self):
        return L1MemoryDesc(ptr=self.tensor.data_ptr(), size=self.tensor.nbytes, align_bytes=4096)

    def object(self, number, value=None):
        raw = self.tensor[number * ELEMENTS : (number + 1) * ELEMENTS]
        if value is not None:
            raw.copy_(torch.arange(ELEMENTS, dtype=torch.float32) * (value + 1))
        metadata = MemoryObjMetadata(
            shape=torch.Size([ELEMENTS]),
            dtype=torch.float32,
            address=raw.data_ptr(),
            phy_size=raw.nbytes,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        return TensorMemoryObj(raw, metadata, parent_allocator=None)


def key(number, salt=""):
    return ObjectKey(bytes([number]) * 4, "model/name", 0x01000100, object_group_id=3, cache_salt=salt)


def wait(descriptor):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(30_000), "nothing was signalled"
    consume_fd(descriptor)


def store(adapter, keys, objects):
    task = adapter.submit_store_task(keys, objects)
    wait(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task]


def lookup(adapter, keys):
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return [found.test(number) for number in range(len(keys))]


def load(adapter, keys, objects):
    task = adapter.submit_load_task(keys, objects)
    wait(adapter.get_load_event_fd())
    loaded = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return [loaded.test(number) for number in range(len(keys))]


def nodes():
    return [redis.Redis(*node.split(":"), protocol=2) for node in REAL.partition("://")[2].split(",")]


@pytest.fixture(params=["rdma", "tcp"] if REAL else ["embedded", "tcp"])
def url(request, name_of_store):
    if REAL:
        for node in nodes():
            node.flushall()
        return REAL.replace("rdma", request.param, 1)
    return serve_embedded(name_of_store) if request.param == "tcp" else f"embedded://{name_of_store}"


@pytest.fixture
def arena():
    return Arena()


@pytest.fixture
def adapter(url, arena):
    entry = {
        "type": "plugin",
        "module_path": "valkey_rdma.lmcache_landing",
        "class_name": "LandingL2Adapter",
        "adapter_params": {"url": url, "window": WINDOW, "max_capacity_gb": 1},
    }
    (config,) = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(entry)])).adapters
    adapter = create_l2_adapter(config, l1_memory_desc=arena.description())
    yield adapter
    adapter.close()


def test_objects_move_between_the_arena_and_the_server(adapter, arena, url):
    assert isinstance(adapter, L2AdapterInterface)
    keys = [key(number) for number in range(COUNT)]
    objects = [arena.object(number, number) for number in range(COUNT)]
    result = store(adapter, keys, objects)
    assert result.is_successful()
    assert result.bytes_transferred() == COUNT * ELEMENTS * 4
    assert lookup(adapter, [*keys, key(99)]) == [True] * COUNT + [False]
    targets = [arena.object(COUNT + number) for number in range(COUNT)]
    assert load(adapter, [*keys, key(99)], [*targets, arena.object(0)]) == [True] * COUNT + [False]
    half = COUNT * ELEMENTS
    assert torch.equal(arena.tensor[:half], arena.tensor[half:])
    adapter.submit_unlock(keys)

    status = adapter.report_status()
    assert status["is_healthy"]
    assert status["transport"] == url.split(":")[0].split("+")[0]
    assert status["no_rdma"] is None
    assert (status["stored_objects"], status["stored_bytes"]) == (COUNT, COUNT * ELEMENTS * 4)
    assert (status["looked_up_objects"], status["found_objects"]) == (COUNT + 1, COUNT)
    assert (status["loaded_objects"], status["missed_loads"]) == (COUNT, 1)
    assert (status["routing"] is not None) == ("+cluster" in url)
    if REAL:
        assert len(status["node_memory"]) == len(nodes())
    if not url.startswith("tcp"):
        assert status["bytes_lent"] == COUNT * ELEMENTS * 4, "nothing that is stored is copied"
        assert status["bytes_landed"] >= COUNT * (ELEMENTS * 4 - 3 * WINDOW)
    usage = adapter.get_usage()
    assert usage.total_bytes_used == COUNT * ELEMENTS * 4
    assert store(adapter, keys[:1], objects[:1]).bytes_transferred() == 0, "counted once"
    adapter.delete(keys)
    assert adapter.get_usage().total_bytes_used == 0
    assert lookup(adapter, keys) == [False] * COUNT


def test_prefixes_keep_caches_apart(url, arena):
    def of(prefix):
        config = LandingL2AdapterConfig.from_dict({"url": url, "connections": 1, "key_prefix": prefix})
        return LandingL2Adapter(config, arena.description())

    one, other, none = adapters = [of(prefix) for prefix in ("one", "other", "")]
    for number, adapter in enumerate(adapters):
        assert store(adapter, [key(1)], [arena.object(number, number)]).is_successful()
    one.delete([key(1)])
    assert [lookup(adapter, [key(1)]) for adapter in adapters] == [[False], [True], [True]]
    assert load(other, [key(1)], [arena.object(3)]) == load(none, [key(1)], [arena.object(4)]) == [True]
    assert torch.equal(arena.object(3).tensor, arena.object(1).tensor)
    assert torch.equal(arena.object(4).tensor, arena.object(2).tensor)
    for adapter in adapters:
        adapter.close()


@pytest.mark.skipif(
    not REAL, reason="VALKEY_TEST_URL names no server; lab/run soft apps/python/lmcache starts one"
)
def test_objects_live_as_long_as_told(url, arena):
    settings = {"url": url, "ttl_seconds": 3600, "key_prefix": "short"}
    adapter = LandingL2Adapter(LandingL2AdapterConfig.from_dict(settings), arena.description())
    keys = [key(number) for number in range(COUNT)]
    assert store(adapter, keys, [arena.object(number, number) for number in range(COUNT)]).is_successful()
    left = [node.pttl(one) for node in nodes() for one in node.keys()]  # noqa: SIM118
    assert len(left) == COUNT
    assert all(3_000_000 < one <= 3_600_000 for one in left)
    adapter.close()


def test_what_is_locked_is_not_deleted(adapter, arena):
    keys = [key(1), key(2)]
    store(adapter, keys, [arena.object(0, 1), arena.object(1, 2)])
    assert lookup(adapter, keys[:1]) == [True]
    assert lookup(adapter, keys[:1]) == [True]
    adapter.submit_unlock(keys[:1])
    adapter.delete(keys)
    assert lookup(adapter, keys) == [True, False]
    adapter.submit_unlock(keys[:1])
    adapter.submit_unlock(keys[:1])
    adapter.delete(keys)
    assert lookup(adapter, keys) == [False, False]


def test_an_object_of_another_length_is_not_loaded(adapter, arena, url):
    with Client(url) as client:
        client.set_from(name(key(1)), bytes(ELEMENTS * 4 - 1))
        client.set_from(name(key(2)), bytes(ELEMENTS * 4 + 1))
        client.set_from(name(key(3)), bytes(ELEMENTS * 4))
    keys = [key(number) for number in (1, 2, 3)]
    assert load(adapter, keys, [arena.object(number) for number in range(3)]) == [False, False, True]


class Listener(L2AdapterListener):
    """Calls a function with the keys that were stored."""

    def __init__(self, stored):
        self._stored = stored

    def on_l2_keys_stored(self, keys, sizes):
        self._stored(keys)

    def on_l2_keys_accessed(self, keys):
        pass

    def on_l2_keys_deleted(self, keys):
        pass


@pytest.fixture
def narrow(url, arena):
    """An adapter with one connection."""
    config = LandingL2AdapterConfig.from_dict({"url": url, "connections": 1})
    adapter = LandingL2Adapter(config, arena.description())
    yield adapter
    adapter.close()


def test_a_listener_may_delete(narrow, arena):
    narrow.register_listener(Listener(narrow.delete))
    assert store(narrow, [key(1)], [arena.object(0, 1)]).is_successful()
    assert lookup(narrow, [key(1)]) == [False]


def test_a_listener_that_fails_does_not_delay_a_store(narrow, arena):
    def fails(_keys):
        raise ValueError("of the listener")

    narrow.register_listener(Listener(fails))
    for number in range(2):
        assert store(narrow, [key(number)], [arena.object(0, 1)]).is_successful()


def test_tasks_of_a_closed_adapter_end(adapter, arena):
    adapter.close()
    stored = adapter.submit_store_task([key(1)], [arena.object(0, 1)])
    assert not adapter.pop_completed_store_tasks()[stored].is_successful()
    loaded = adapter.submit_load_task([key(1)], [arena.object(0)])
    assert not adapter.query_load_result(loaded).test(0)
    found = adapter.submit_lookup_and_lock_task([key(1)], {})
    assert not adapter.query_lookup_and_lock_result(found).test(0)
    adapter.delete([key(1)])


def test_keys_are_those_of_lmcache():
    for one in [key(1), key(255, salt="user-1")]:
        assert name(one) == _object_key_to_string(one)
        assert name(one, "prefix") == f"prefix@{_object_key_to_string(one)}"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"url": 5},
        {"url": "x", "connections": 0},
        {"url": "x", "window": True},
        {"url": "x", "timeout": 0},
        {"url": "x", "host": "y"},
        {"url": "x", "ttl_seconds": 0},
        {"url": "x", "ttl_seconds": True},
        {"url": "x", "key_prefix": "a@b"},
        {"url": "x", "key_prefix": "{a}"},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"url|must be|unknown"):
        LandingL2AdapterConfig.from_dict(wrong)


def test_the_arena_is_given_back(url, arena):
    adapter = LandingL2Adapter(LandingL2AdapterConfig.from_dict({"url": url}), arena.description(), further=1)
    assert adapter._pool._clients[0].registrations == 1
    adapter.close()
    adapter.close()
    assert adapter._pool._clients[0].registrations == 0
