"""On a cluster of three real Valkeys, over RDMA and over TCP: `lab/run soft apps/python/valkey` and the guest have them."""

import asyncio
import contextlib
import threading

import pytest
import redis
from conftest import pattern
from servers import LONG, Servers, missing, until

import valkey_rdma
from valkey_rdma import AsyncClient, Client, ConnectError, ConnectionLost, Refused
from valkey_rdma.pool import Pool

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
MIB = 1 << 20
# In slots 5061, 866 and 12182: the first two are of the first node, the last is of the third.
KEYS = ["bar", "hello", "foo"]
# No bound that a machine standing still for some seconds would exceed.
PATIENT = {"timeout": LONG, "connect_timeout": LONG}


@pytest.fixture(scope="module")
def servers():
    with contextlib.closing(Servers(3, 7001)) as servers:
        yield servers


@pytest.fixture(params=["rdma", "tcp"])
def url(request, servers):
    yield f"{request.param}+cluster://{servers.hosts}"
    for number in range(3):
        servers.node(number).flushall()


@pytest.fixture
def client(url):
    # One of three: the others are found.
    with Client(url.split(",")[0], **PATIENT) as client:
        yield client


def over_rdma(client):
    return client.transport == "rdma"


def test_values_go_to_all_nodes_and_come_back(client, servers):
    count, length = 30, 2 * MIB + 17
    arena = bytearray(2 * count * length)
    client.register(arena)
    view = memoryview(arena)
    parts = [view[number * length : (number + 1) * length] for number in range(2 * count)]
    keys = [f"key:{number}" for number in range(count)]
    for number in range(count):
        parts[number][:] = pattern(length, number)
    assert client.mset_from(zip(keys, parts, strict=False)) == [None] * count
    assert sum(servers.node(number).dbsize() for number in range(3)) == count
    assert all(servers.node(number).dbsize() > 0 for number in range(3))
    got = client.mget_into([*zip(keys, parts[count:], strict=True), ("none", bytearray(1))])
    assert got == [length] * count + [None]
    assert view[: count * length] == view[count * length :]
    assert client.present(*keys, "none") == [True] * count + [False]
    assert (client.exists(*keys, "none"), client.strlen("key:3")) == (count, length)
    assert client.get("key:4") == pattern(length, 4)
    assert client.registrations == 1
    counts = client.counts
    if over_rdma(client):
        assert counts.bytes_lent == count * length, "a SET is lent, whichever node it goes to"
        assert counts.bytes_landed >= count * (length - 2 * MIB + 1)
    else:
        assert (counts.bytes_lent, counts.bytes_landed) == (0, 0)
    memory = client.node_memory()
    assert sorted(memory) == servers.hosts.split(",")
    assert sum(of["used_memory"] for of in memory.values()) > count * length
    assert all(of["maxmemory"] == 0 for of in memory.values())
    assert client.delete(*keys, "none") == count
    assert client.routing["moved"] == 0
    client.unregister(arena)
    assert client.registrations == 0


def test_siblings_share_what_is_registered(client):
    arena = bytearray(4 * MIB)
    with client.another() as other:
        client.register(arena)
        with pytest.raises(BufferError):
            other.register(memoryview(arena)[MIB:])
        with other.another() as third:
            for number, one in enumerate([client, other, third]):
                for key in KEYS:
                    arena[:] = pattern(len(arena), number)
                    one.set_from(key, arena)
                    assert one.get_into(key, arena) == len(arena)
                    assert arena == pattern(len(arena), number)
                assert one.counts.bytes_lent == (3 * len(arena) if over_rdma(client) else 0)


def test_keys_live_as_long_as_told(client, servers):
    client.set("foo", b"value", ttl=1000)
    client.mset_from([("bar", b"value"), ("hello", b"value")], ttl=2000.5)
    left = {key: number for number in range(3) for key in servers.node(number).keys()}  # noqa: SIM118
    for key, most in [(b"foo", 1_000_000), (b"bar", 2_000_500), (b"hello", 2_000_500)]:
        assert most - 200_000 < servers.node(left[key]).pttl(key) <= most
    client.set("foo", b"value")
    assert servers.node(left[b"foo"]).pttl("foo") == -1


def test_a_slot_that_moves_is_followed(client, servers):
    """As `valkey-cli --cluster reshard` does it, looked at on its way."""
    slot, value = 12182, pattern(3 * MIB)
    source, target = servers.node(2), servers.node(0)
    ids = [one.execute_command("CLUSTER MYID").decode() for one in (source, target)]
    client.set("{foo}stays", value)
    client.set("{foo}goes", value)
    try:
        target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        source.execute_command("MIGRATE", servers.host, servers.ports[0], "{foo}goes", 0, 60_000)
        into = bytearray(len(value))
        for key, asked in [("{foo}stays", 0), ("{foo}goes", 1)]:
            before = client.routing
            assert client.get_into(key, into) == len(value)
            assert into == value
            assert client.routing["asked"] - before["asked"] == asked
            assert client.routing["moved"] == before["moved"]
        client.set("{foo}new", value)
        assert target.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 2
        source.execute_command("MIGRATE", servers.host, servers.ports[0], "{foo}stays", 0, 60_000)
        for one in (target, source, servers.node(1)):
            one.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        servers.settled(slot, 0)
        before = client.routing
        for _again in range(2):
            assert client.get("{foo}stays") == value
            assert client.present("{foo}stays", "{foo}new", "{foo}goes") == [True] * 3
        # Of a map that is asked for meanwhile, the slot is known without.
        assert client.routing["moved"] - before["moved"] <= 1
        assert client.routing["asked"] == before["asked"]
    finally:
        source.flushall()
        target.flushall()
        for one in (source, target):
            one.execute_command("CLUSTER SETSLOT", slot, "STABLE")
        # A node that imports a slot and gets it takes a new epoch, which outdates the messages in flight. It is refused if the
        # slot never moved.
        with contextlib.suppress(redis.ResponseError):
            source.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[1])
        for one in (source, target, servers.node(1)):
            one.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[0])
        servers.settled(slot, 2)


def test_a_node_that_dies_takes_its_keys_and_no_others(client, servers):
    for key in KEYS:
        client.set(key, b"value")
    servers.stop(2)
    try:
        for key in KEYS[:2]:
            assert client.get(key) == b"value"
        with pytest.raises((ConnectionLost, Refused)):
            client.get("foo")
        got = client.mget_into([(key, bytearray(5)) for key in KEYS])
        assert got[:2] == [5, 5]
        assert isinstance(got[2], valkey_rdma.Error)
        assert client.mset_from([(key, b"other") for key in KEYS])[:2] == [None, None]
    finally:
        servers.start(2)
        until(lambda: servers.node(2).execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    client.set("foo", b"again")
    assert client.get("foo") == b"again", "the connection was made again"


def test_pools_and_asyncio(url):
    pool = Pool(url, 3, **PATIENT)
    arena = bytearray(2 * MIB)
    pool.register(arena)
    ended = threading.Semaphore(0)
    failed = []

    def done(results):
        failed.extend(result for result in results if result is not None)
        ended.release()

    for number in range(30):
        pool.submit([lambda client, number=number: client.set(f"key:{number}", b"value")], done)
    for _ in range(30):
        assert ended.acquire(timeout=LONG)
    assert not failed
    assert pool.call(lambda client: client.exists(*(f"key:{number}" for number in range(30)))) == 30
    assert pool.transport == url.split("+")[0]
    assert pool.routing["connected"] >= 9
    pool.close()

    async def tasks():
        async with await AsyncClient.connect(url, **PATIENT) as client:
            await asyncio.gather(*(client.set(f"key:{number}", b"x", ttl=60) for number in range(30)))
            return await client.present("key:1", "none"), client.routing["moved"]

    assert asyncio.run(tasks()) == ([True, False], 0)


def test_rdma_where_it_connects_and_tcp_otherwise(servers):
    with Client(f"valkey+cluster://{servers.hosts}", **PATIENT) as client:
        client.set("foo", b"value")
        assert (client.transport, client.no_rdma) == ("rdma", None)
    with contextlib.closing(Servers(1, 7011, rdma=False)) as plain:
        with Client(f"valkey://{plain.hosts}", **PATIENT) as client, client.another() as other:
            client.set("foo", b"value")
            assert other.get("foo") == b"value"
            assert client.transport == other.transport == "tcp"
            assert client.no_rdma
        with pytest.raises(ConnectError):
            Client(f"rdma://{plain.hosts}")
        with pytest.raises(ConnectError, match="cluster support disabled"):
            Client(f"tcp+cluster://{plain.hosts}")


def test_nothing_there():
    with pytest.raises(ConnectError):
        Client("tcp+cluster://127.0.0.1:1")
    with pytest.raises(ConnectError, match="an address is"):
        Client("tcp://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(ConnectError, match="is no transport"):
        Client("embedded+cluster://one")
