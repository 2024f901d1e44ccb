"""Many operations, after which nothing is left: no memory, no registration, no descriptor, no thread."""

import asyncio
import contextlib
import gc
import threading

import psutil
import pytest
from conftest import WINDOW, pattern

from valkey_rdma import AsyncClient, Client, ConnectError, ValueTooLong

MIB = 1 << 20
process = psutil.Process()


class Held:
    """What the process holds."""

    def __init__(self):
        gc.collect()
        self.memory = process.memory_info().rss
        self.descriptors = process.num_fds()
        self.threads = threading.active_count()

    def assert_no_more(self, before, grown):
        # Fewer are right: the store may have let go of an earlier client's meanwhile.
        assert self.descriptors <= before.descriptors
        assert self.threads <= before.threads
        assert self.memory - before.memory < grown, f"{(self.memory - before.memory) / MIB:.1f} MiB more"


def operations(client, small, large):
    buffer, arena = bytearray(100), bytearray(32 * MIB)
    client.register(arena)
    short = memoryview(arena)[: WINDOW - 1]
    client.set_from("small", buffer)
    for number in range(small // 4):
        client.get_into("small", buffer if number % 2 else short)
        client.set_from("small", buffer)
        client.get_into("none", buffer)
        if number % 100 == 0:
            with contextlib.suppress(ValueTooLong):
                client.get_into("small", memoryview(buffer)[:10])
        else:
            client.mget_into([("small", buffer)])
    for number in range(large // 2):
        if number % 10 == 0:
            client.unregister(arena)
            client.register(arena)
        view = memoryview(arena)[number : number + 4 * MIB]
        client.set_from("large", view)
        assert client.get_into("large", view) == 4 * MIB
    assert client.registrations == 1
    client.unregister(arena)
    assert client.registrations == 0
    short.release()
    view.release()
    arena.append(1)


def leaves_nothing(client, small, large, grown):
    operations(client, 2000, 20)
    before = Held()
    operations(client, small, large)
    after = Held()
    after.assert_no_more(before, grown)
    print(f"{small} small and {large} large: {(after.memory - before.memory) / MIB:+.1f} MiB")


def test_some_operations_leave_nothing(client):
    # Of which the allocator keeps some: the store is in this process, too.
    leaves_nothing(client, 20_000, 40, 48 * MIB)


def test_a_large_value_leaves_no_large_buffer(client):
    def value(length):
        client.set("value", bytes(length))
        assert len(client.get("value")) == length
        assert client.delete("value") == 1

    value(64)
    value(4 * MIB)
    before = Held()
    value(64 * MIB)
    value(64)
    # The store is in this process, too.
    Held().assert_no_more(before, 16 * MIB)


@pytest.mark.long
def test_a_million_operations_leave_nothing(client):
    # 17 bytes for each, and four of the large values.
    leaves_nothing(client, 1_000_000, 1000, 16 * MIB)


def test_clients_leave_nothing(url):
    def one():
        arena = bytearray(pattern(4 * WINDOW))
        with Client(url, window=WINDOW) as client, client.another() as other:
            client.register(arena)
            other.set_from("key", arena)
            client.get_into("key", arena)
        arena.append(1)
        with pytest.raises(ConnectError):
            Client("tcp://127.0.0.1:1")

    with Client(url):
        for _ in range(5):
            one()
        settle()
        before = Held()
        for _ in range(50):
            one()
        settle(before)
        Held().assert_no_more(before, 48 * MIB)


def settle(before=None):
    """Waits for the threads and descriptors of the store, which notices a moment later that a client has left."""
    seen = -1
    for _ in range(200):
        if before is None and process.num_fds() == seen:
            return
        if before is not None and process.num_fds() <= before.descriptors:
            return
        seen = process.num_fds()
        threading.Event().wait(0.05)


def test_cancelled_tasks_leave_nothing(client, url):
    async def work(tasks):
        async with await AsyncClient.connect(
            url, timeout=30, connect_timeout=30, window=WINDOW
        ) as asynchronous:
            arena = bytearray(4 * WINDOW)
            await asynchronous.register(arena)
            for turn in range(tasks // 10):
                batch = [asyncio.create_task(asynchronous.get_into("key", arena)) for _ in range(10)]
                for _ in range(turn % 5):
                    await asyncio.sleep(0)
                for task in batch[turn % 2 :: 2]:
                    task.cancel()
                await asyncio.gather(*batch, return_exceptions=True)
            await asynchronous.unregister(arena)
            arena.append(1)
            assert asynchronous.registrations == 0

    client.set_from("key", pattern(4 * WINDOW))
    asyncio.run(work(200))
    settle()
    before = Held()
    asyncio.run(work(2000))
    settle(before)
    Held().assert_no_more(before, 48 * MIB)
