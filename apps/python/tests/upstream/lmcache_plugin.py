"""Lets LMCache's own tests of its mock and native adapters run on ours: `apps/python/lmcache` says how."""

import itertools

import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock
import lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter as native
import pytest
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

names = (f"embedded://upstream-{number}" for number in itertools.count())

# What is about something else than the interface.
OTHERS = {
    "TestBandwidthSimulation": "about the bandwidth that the mock simulates",
    "TestPadBuffersToAlignment": "about padding for direct I/O, which files need",
    "L2AdapterConfig::": "about the settings of other adapters",
    "test_delete_noop_without_submit_batch_delete": "about a native client that cannot delete",
}


def ours(max_capacity_gb):
    parameters = {"url": next(names), "max_capacity_gb": max_capacity_gb, "connections": 2}
    entry = {"type": "plugin", "module_path": "valkey_rdma.lmcache_landing", "class_name": "LandingL2Adapter"}
    return create_l2_adapter(PluginL2AdapterConfig.from_dict(entry | {"adapter_params": parameters}))


mock.MockL2Adapter = lambda config: ours(config.max_size_gb)
native.NativeConnectorL2Adapter = lambda client, max_capacity_gb=0, **_others: ours(max_capacity_gb)


def pytest_collection_modifyitems(items):
    for item in items:
        for name, reason in OTHERS.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
