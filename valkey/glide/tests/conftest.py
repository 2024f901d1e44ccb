"""Servers for the tests: each listens on one port for RDMA and TCP. lab/run soft sets what they need."""

import contextlib

import pytest
import servers


@pytest.fixture(scope="module")
def alone():
    """A Valkey."""
    with contextlib.closing(servers.Servers(1, 7301)) as made:
        yield made


@pytest.fixture(scope="module")
def cluster():
    """A cluster of three."""
    with contextlib.closing(servers.Servers(3, 7311)) as made:
        yield made


@pytest.fixture(scope="module")
def only_tcp():
    """A Valkey that does not listen for RDMA."""
    with contextlib.closing(servers.Servers(1, 7321, rdma=False)) as made:
        yield made
