"""The asynchronous client: the same over each transport."""

import asyncio
import contextlib
import os

import glide
import pytest
import seen

LARGE = 8 << 20
# Nothing below is decided by how long a busy machine stands still.
LONG = 120
TRANSPORTS = pytest.mark.parametrize("transport", [glide.Transport.RDMA, glide.Transport.TCP], ids=["rdma", "tcp"])


@contextlib.asynccontextmanager
async def connected(servers, transport, **settings):
    """A client of one server or of a cluster, which is told of its first node only."""
    addresses = [glide.NodeAddress(servers.host, servers.ports[0])]
    base = {"addresses": addresses, "request_timeout": LONG * 1000, **settings}
    advanced = {"connection_timeout": LONG * 1000, "transport": transport}
    if servers.clustered:
        advanced = glide.AdvancedGlideClusterClientConfiguration(**advanced)
        configuration = glide.GlideClusterClientConfiguration(advanced_config=advanced, **base)
        client = await glide.GlideClusterClient.create(configuration)
    else:
        advanced = glide.AdvancedGlideClientConfiguration(**advanced)
        configuration = glide.GlideClientConfiguration(advanced_config=advanced, **base)
        client = await glide.GlideClient.create(configuration)
    try:
        yield client
        # What connected by another way than it was told would pass every other check.
        assert (seen.over_tcp(servers) > 0) == (transport is glide.Transport.TCP)
    finally:
        await client.close()


async def until(what):
    async with asyncio.timeout(LONG):
        while not await what():
            await asyncio.sleep(0.05)


@TRANSPORTS
def test_set_and_get(alone, transport):
    async def run():
        async with connected(alone, transport) as client:
            assert await client.set("greeting", "hello") == "OK"
            assert await client.get("greeting") == b"hello"
            assert await client.get("nothing") is None
            with pytest.raises(glide.RequestError, match="WRONGTYPE"):
                await client.lpush("greeting", ["no list"])

    asyncio.run(run())


@TRANSPORTS
@pytest.mark.parametrize("length", [0, 1, 4095, 65536, 1 << 20, LARGE, 3 * LARGE])
def test_values_of_any_length(alone, transport, length):
    async def run():
        value = os.urandom(length)
        async with connected(alone, transport) as client:
            for _ in range(2):
                assert await client.set("value", value) == "OK"
                assert await client.get("value") == value
            # The stream is still in step.
            assert await client.ping() == b"PONG"

    asyncio.run(run())


@TRANSPORTS
def test_many_tasks_on_one_stream(alone, transport):
    async def run():
        async with connected(alone, transport) as client:
            async def task(number):
                for turn in range(50):
                    key = f"{number}.{turn}"
                    assert await client.set(key, key) == "OK"
                    assert await client.get(key) == key.encode()

            await asyncio.gather(*map(task, range(30)))

    asyncio.run(run())


@TRANSPORTS
def test_large_and_small_values_side_by_side(alone, transport):
    async def run():
        large = os.urandom(LARGE)
        async with connected(alone, transport) as client:
            async def of_large(number):
                for _ in range(3):
                    assert await client.set(f"large.{number}", large) == "OK"
                    assert await client.get(f"large.{number}") == large

            async def of_small(number):
                for turn in range(200):
                    assert await client.incr(f"small.{number}") == turn + 1

            await client.delete([f"small.{number}" for number in range(20)])
            await asyncio.gather(*map(of_large, range(3)), *map(of_small, range(20)))

    asyncio.run(run())


@TRANSPORTS
def test_batches(alone, transport):
    async def run():
        async with connected(alone, transport) as client:
            for atomic in (True, False):
                batch = glide.Batch(is_atomic=atomic)
                batch.set("counter", "1").incr("counter").incr("counter").get("counter")
                assert await client.exec(batch, raise_on_error=True) == ["OK", 2, 3, b"3"]

    asyncio.run(run())


@TRANSPORTS
def test_blocking_command(alone, transport):
    async def run():
        async with connected(alone, transport) as waiter, connected(alone, transport) as other:
            await other.delete(["queue"])
            waiting = asyncio.create_task(waiter.blpop(["queue"], LONG))
            await until(lambda: blocks(other))
            await other.rpush("queue", ["served"])
            assert await waiting == [b"queue", b"served"]

    async def blocks(client):
        return b"blocked_clients:1" in await client.info([glide.InfoSection.CLIENTS])

    asyncio.run(run())


@TRANSPORTS
def test_publish_and_subscribe(alone, transport):
    modes = glide.GlideClientConfiguration.PubSubChannelModes
    wanted = {modes.Exact: {"news"}, modes.Pattern: {"weather.*"}}

    async def run():
        subscriptions = glide.GlideClientConfiguration.PubSubSubscriptions(wanted, None, None)
        async with (
            connected(alone, transport, pubsub_subscriptions=subscriptions) as listener,
            connected(alone, transport) as speaker,
        ):
            for number in range(100):
                assert await speaker.publish(f"{number}", "news") == 1
                message = await listener.get_pubsub_message()
                assert (message.message, message.channel, message.pattern) == (str(number).encode(), b"news", None)
            large = os.urandom(1 << 20)
            assert await speaker.publish(large, "weather.here") == 1
            message = await listener.get_pubsub_message()
            assert (message.message, message.pattern) == (large, b"weather.*")
            # The same connection takes commands, too.
            assert await listener.set("said", "too") == "OK"

    asyncio.run(run())


@TRANSPORTS
def test_a_lost_connection_is_made_again(alone, transport):
    async def run():
        async with connected(alone, transport, client_name="lost") as client:
            for _ in range(3):
                assert await client.set("kept", "yes") == "OK"
                before = await client.client_id()
                with alone.node(0) as node:
                    for other in node.client_list():
                        if other["name"] == "lost":
                            node.client_kill_filter(_id=other["id"])
                await until(lambda: answers(client))
                assert await client.client_id() != before
                assert await client.get("kept") == b"yes"

    async def answers(client):
        with contextlib.suppress(glide.ConnectionError, glide.RequestError):
            return await client.ping() == b"PONG"

    asyncio.run(run())


@TRANSPORTS
def test_a_limit_on_requests_in_flight(alone, transport):
    async def run():
        async with connected(alone, transport, inflight_requests_limit=5) as client:
            await client.delete(["never"])
            waiting = [asyncio.create_task(client.blpop(["never"], LONG)) for _ in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(glide.RequestError, match="maximum inflight"):
                async with asyncio.timeout(LONG):
                    while True:
                        await client.ping()
            with alone.node(0) as node:
                for _ in waiting:
                    node.rpush("never", "now")
            await asyncio.gather(*waiting)

    asyncio.run(run())


@TRANSPORTS
def test_cluster(cluster, transport):
    async def run():
        async with connected(cluster, transport) as client:
            keys = [f"key.{number}" for number in range(300)]
            await asyncio.gather(*(client.set(key, key) for key in keys))
            assert await asyncio.gather(*map(client.get, keys)) == [key.encode() for key in keys]
            # Of every node: those that were discovered, too.
            sizes = await client.custom_command(["DBSIZE"], glide.AllPrimaries())
            sizes = sizes.values() if isinstance(sizes, dict) else [sizes]
            assert sum(sizes) >= len(keys)
            value = os.urandom(LARGE)
            for number in range(6):
                assert await client.set(f"large.{number}", value) == "OK"
                assert await client.get(f"large.{number}") == value

    asyncio.run(run())
    with contextlib.ExitStack() as stack:
        for number in range(len(cluster.ports)):
            assert stack.enter_context(cluster.node(number)).dbsize() > 0


@TRANSPORTS
def test_sharded_publish_and_subscribe(cluster, transport):
    modes = glide.GlideClusterClientConfiguration.PubSubChannelModes
    channels = {f"channel.{number}" for number in range(12)}

    async def run():
        subscriptions = glide.GlideClusterClientConfiguration.PubSubSubscriptions({modes.Sharded: channels}, None, None)
        async with (
            connected(cluster, transport, pubsub_subscriptions=subscriptions) as listener,
            connected(cluster, transport) as speaker,
        ):
            for channel in sorted(channels):
                await until(lambda channel=channel: heard(speaker, channel))
                message = await listener.get_pubsub_message()
                assert (message.message, message.channel) == (b"hello", channel.encode())

    async def heard(speaker, channel):
        return await speaker.publish("hello", channel, sharded=True) == 1

    asyncio.run(run())


@pytest.mark.parametrize("transport", [glide.Transport.RDMA, glide.Transport.RDMA_OR_TCP], ids=["rdma", "rdma-or-tcp"])
def test_no_rdma_on_the_server(only_tcp, transport, capfd):
    async def run():
        async with connected_or_tcp() as client:
            assert await client.set("by", "tcp") == "OK"
            assert seen.over_tcp(only_tcp) > 0

    def connected_or_tcp():
        addresses = [glide.NodeAddress(only_tcp.host, only_tcp.ports[0])]
        advanced = glide.AdvancedGlideClientConfiguration(connection_timeout=LONG * 1000, transport=transport)
        configuration = glide.GlideClientConfiguration(addresses, advanced_config=advanced, reconnect_strategy=ONCE)
        return closing(glide.GlideClient.create(configuration))

    if transport is glide.Transport.RDMA:
        with pytest.raises(glide.ClosingError, match="nothing listens there for RDMA"):
            asyncio.run(run())
    else:
        asyncio.run(run())
        # It says so, and why.
        said = capfd.readouterr()
        assert "using TCP instead" in said.out + said.err
        assert "nothing listens there for RDMA" in said.out + said.err


ONCE = glide.BackoffStrategy(num_of_retries=0, factor=1, exponent_base=2)


@contextlib.asynccontextmanager
async def closing(creating):
    client = await creating
    try:
        yield client
    finally:
        await client.close()


def test_tls_is_refused(alone):
    async def run():
        addresses = [glide.NodeAddress(alone.host, alone.ports[0])]
        advanced = glide.AdvancedGlideClientConfiguration(transport=glide.Transport.RDMA)
        await glide.GlideClient.create(glide.GlideClientConfiguration(addresses, use_tls=True, advanced_config=advanced))

    with pytest.raises((glide.ConfigurationError, glide.ClosingError), match="TLS is not supported over RDMA"):
        asyncio.run(run())


def test_the_connection_timeout_holds():
    """A peer that never answers: no other limit ends the attempt before the test's."""

    async def run():
        # Of no machine on softrdma's network: the address is looked for as long as the attempt lasts.
        addresses = [glide.NodeAddress("192.0.2.99", 6379)]
        advanced = glide.AdvancedGlideClientConfiguration(connection_timeout=300, transport=glide.Transport.RDMA)
        configuration = glide.GlideClientConfiguration(addresses, advanced_config=advanced, reconnect_strategy=ONCE)
        async with asyncio.timeout(LONG):
            await glide.GlideClient.create(configuration)

    with pytest.raises(glide.ClosingError, match="timed out"):
        asyncio.run(run())
