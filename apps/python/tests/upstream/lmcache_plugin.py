"""Lets LMCache's own tests of its mock, native and Valkey adapters run on ours: `apps/python/lmcache` says how.

With VALKEY_TEST_URL, on that server or cluster over RDMA.
"""

import itertools
import os

import lmcache.v1.distributed.l2_adapters as adapters
import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock
import lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter as native
import lmcache.v1.distributed.l2_adapters.valkey_l2_adapter as valkey
import pytest
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

REAL = os.environ.get("VALKEY_TEST_URL", "")
names = (f"upstream-{number}" for number in itertools.count())

# What is about something else than the interface.
OTHERS = {
    "TestBandwidthSimulation": "about the bandwidth that the mock simulates",
    "TestPadBuffersToAlignment": "about padding for direct I/O, which files need",
    "L2AdapterConfig::": "about the settings of other adapters",
    "test_delete_noop_without_submit_batch_delete": "about a native client that cannot delete",
}


def ours(max_capacity_gb, key_prefix=""):
    name = next(names)
    parameters = {"max_capacity_gb": max_capacity_gb, "connections": 2}
    # Tests begin with an empty store.
    parameters |= {"url": REAL, "key_prefix": key_prefix + name} if REAL else {"url": f"embedded://{name}"}
    entry = {
        "type": "plugin",
        "module_path": "valkey_rdma.lmcache_landing",
        "class_name": "LandingL2Adapter",
        "adapter_params": parameters,
    }
    return create_l2_adapter(PluginL2AdapterConfig.from_dict(entry))


mock.MockL2Adapter = lambda config: ours(config.max_size_gb)
valkey.ValkeyL2Adapter = lambda config: ours(config.max_capacity_gb, config.key_prefix)
adapters.create_l2_adapter = valkey.ValkeyL2Adapter
native.NativeConnectorL2Adapter = lambda client, max_capacity_gb=0, **_others: ours(max_capacity_gb)


def pytest_addoption(parser):
    """The options of LMCache's conftest, which its other tests need more for."""
    parser.addoption("--valkey-cluster", action="store_true")
    for name, default in [("nodes", "in.the.url:1"), ("host", "in.the.url"), ("port", "1")]:
        parser.addoption(f"--valkey-{name}", default=default)


def pytest_collection_modifyitems(items):
    for item in items:
        for name, reason in OTHERS.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
