import asyncio
import threading

import pytest
from conftest import WINDOW, pattern

import valkey_rdma
from valkey_rdma import AsyncClient


def test_values_come_back(url):
    async def work():
        async with await AsyncClient.connect(url, timeout=30, connect_timeout=30, window=WINDOW) as client:
            arena = bytearray(20 * WINDOW)
            await client.register(arena)
            sent, received = memoryview(arena)[: 10 * WINDOW], memoryview(arena)[10 * WINDOW :]
            sent[:] = pattern(10 * WINDOW)
            await client.set_from("key", sent)
            assert await client.get_into("key", received) == len(sent)
            assert sent == received
            assert await client.mget_into([("key", sent), ("none", received)]) == [len(sent), None]
            assert await client.mset_from([("empty", b""), ("again", b"x")]) == [None, None]
            assert await client.strlen("key") == len(sent)
            async with await client.another() as other:
                assert other.registrations == 1
                assert await other.exists("key", "none") == 1
            assert await client.delete("key") == 1
            counts = client.counts
            assert counts.bytes_landed + counts.bytes_copied + counts.bytes_lent == 3 * len(sent) + 1
            await client.unregister(arena)
            sent.release()
            received.release()
            arena.append(1)
            assert url in repr(client)
        with pytest.raises(valkey_rdma.Closed):
            await client.strlen("key")
        await client.close()

    asyncio.run(work())


def test_the_loop_runs_while_a_command_waits(peer):
    async def work():
        connecting = asyncio.create_task(AsyncClient.connect(peer.url, timeout=30))
        await asyncio.to_thread(peer.accept)
        client = await connecting
        buffer = bytearray(5)
        getting = asyncio.create_task(client.get_into("key", buffer))
        await asyncio.to_thread(peer.until, b"key\r\n")
        with pytest.raises(BufferError):
            buffer.append(1)
        peer.stream.sendall(b"$5\r\nvalue\r\n")
        assert await getting == 5
        assert buffer == b"value"
        buffer.append(1)
        await client.close()

    asyncio.run(work())


def test_a_cancelled_task_ends_with_its_command(peer):
    """The buffer is in use until then, and free afterwards; the client can be used further."""

    async def work():
        connecting = asyncio.create_task(AsyncClient.connect(peer.url, timeout=30))
        await asyncio.to_thread(peer.accept)
        client = await connecting
        under_way, queued = bytearray(5), bytearray(5)
        first = asyncio.create_task(client.get_into("first", under_way))
        await asyncio.to_thread(peer.until, b"first\r\n")
        second = asyncio.create_task(client.get_into("second", queued))
        await asyncio.sleep(0)
        with pytest.raises(BufferError):
            queued.append(1)

        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        queued.append(1)

        for _ in range(3):
            first.cancel()
            await asyncio.sleep(0)
            assert not first.done(), "the server may still write to the buffer"
            with pytest.raises(BufferError):
                under_way.append(1)
        peer.stream.sendall(b"$5\r\nvalue\r\n")
        with pytest.raises(asyncio.CancelledError):
            await first
        assert under_way == b"value"
        under_way.append(1)

        third = asyncio.create_task(client.strlen("third"))
        assert await asyncio.to_thread(peer.until, b"third\r\n") == b"*2\r\n$6\r\nSTRLEN\r\n$5\r\nthird\r\n"
        peer.stream.sendall(b":7\r\n")
        assert await third == 7
        await client.close()

    asyncio.run(work())


def test_a_cancelled_task_ends_when_the_server_says_nothing(peer):
    async def work():
        client = await AsyncClient.connect(peer.url, timeout=0.1)
        buffer = bytearray(5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.get_into("key", buffer), timeout=0.01)
        buffer.append(1)
        with pytest.raises(valkey_rdma.ConnectionLost):
            await client.strlen("key")
        again = await client.another()
        await asyncio.gather(client.close(), again.close())

    asyncio.run(work())


def test_a_cancelled_close_closes(peer):
    async def work():
        connecting = asyncio.create_task(AsyncClient.connect(peer.url, timeout=30))
        await asyncio.to_thread(peer.accept)
        client = await connecting
        getting = asyncio.create_task(client.strlen("key"))
        await asyncio.to_thread(peer.until, b"key\r\n")
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(valkey_rdma.Closed):
            await client.exists("key")
        assert not getting.done(), "it was given before"
        peer.stream.sendall(b":7\r\n")
        assert await getting == 7
        await client.close()
        assert await asyncio.to_thread(peer.stream.recv, 1) == b"", "the connection is open"

    asyncio.run(work())


def test_cancelled_tasks_leave_nothing_behind(rdma, name):
    async def work():
        client = await AsyncClient.connect(
            f"embedded://{name}", timeout=30, connect_timeout=30, window=WINDOW
        )
        buffers = [bytearray(pattern(4 * WINDOW, seed)) for seed in range(20)]
        arena = bytearray(4 * WINDOW)
        await client.register(arena)
        await client.set_from("key", buffers[0])
        threads = threading.active_count()
        for turn in range(20):
            tasks = [asyncio.create_task(client.get_into("key", buffer)) for buffer in [arena, *buffers]]
            for _ in range(turn):
                await asyncio.sleep(0)
            for task in tasks[turn % 3 :: 2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for buffer in buffers:
                buffer.append(1)
                buffer.pop()
        assert threading.active_count() == threads
        assert client.registrations == 1
        assert await client.get_into("key", arena) == len(arena)
        assert arena == pattern(4 * WINDOW, 0)
        await client.close()

    asyncio.run(work())
