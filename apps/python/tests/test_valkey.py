"""Against a real Valkey, which `lab/run soft apps/python/valkey` and the guest have."""

import os
import random

import pytest
import redis
from conftest import pattern

from valkey_rdma import Client, ConnectError

URL = os.environ.get("VALKEY_URL", "")
pytestmark = pytest.mark.skipif(not URL, reason="VALKEY_URL names no server; apps/python/valkey starts one")
MIB = 1 << 20


@pytest.fixture(params=["rdma", "tcp"])
def client(request):
    scheme, _, host = URL.partition("://")
    assert scheme == "rdma"
    with Client(f"{request.param}://{host}", timeout=120, connect_timeout=120) as client:
        yield client
        client.delete("key")


@pytest.mark.parametrize(
    "length", [0, 1, MIB - 1, MIB, MIB + 1, 4 * MIB, 32 * MIB - 1, 32 * MIB, 32 * MIB + 1, 64 * MIB]
)
def test_values_come_back(client, length):
    arena = bytearray(2 * length + 2)
    client.register(arena)
    # The first is at no multiple of a word.
    sent, received = memoryview(arena)[1 : 1 + length], memoryview(arena)[1 + length : 1 + 2 * length]
    sent[:] = pattern(length)
    client.set_from("key", sent)
    assert client.get_into("key", received) == length
    assert sent == received
    counts = client.counts
    over_rdma = "of rdma" in repr(client)
    assert counts.bytes_lent == (length if over_rdma else 0), "a SET is lent"
    if over_rdma:
        assert counts.bytes_landed >= length - 2 * MIB, counts
        if length == 32 * MIB:
            assert counts.bytes_landed >= 0.96 * length, counts
    assert counts.bytes_lent + counts.bytes_landed + counts.bytes_copied == 2 * length


def test_each_connection_logs_in(client):
    scheme = repr(client).split()[-1].split(":")[0]
    host = URL.removeprefix("rdma://")
    server = redis.Redis(*host.rsplit(":", 1))
    server.acl_setuser("loader", enabled=True, passwords=["+s@cond"], keys=["*"], commands=["+@all"])
    value, arena = pattern(4 * MIB), bytearray(4 * MIB)
    with (
        Client(f"{scheme}://loader:s%40cond@{host}/3", timeout=120, connect_timeout=120) as three,
        three.another() as other,
    ):
        three.register(arena)
        three.set_from("key", value)
        assert other.get_into("key", arena) == len(arena)
        assert arena == value
        assert client.exists("key") == 0, "it is in another database"
        other.delete("key")
    for wrong, words in [("loader:first@", "WRONGPASS"), (":first@", "WRONGPASS|without any password")]:
        with pytest.raises(ConnectError, match=words):
            Client(f"{scheme}://{wrong}{host}")
    with pytest.raises(ConnectError, match="out of range"):
        Client(f"{scheme}://{host}/99")
    server.acl_deluser("loader")


def test_random_lengths_registered_and_not(client):
    rng = random.Random(1)
    arena = bytearray(8 * MIB)
    client.register(arena)
    for turn in range(50):
        length = rng.randrange(4 * MIB)
        value = pattern(length, turn)
        client.set_from("key", value)
        into = memoryview(arena)[turn : turn + length] if turn % 2 else memoryview(bytearray(length))
        assert client.get_into("key", into) == length
        assert into == value
