import asyncio

import pytest
from conftest import WINDOW, pattern

from valkey_rdma.aio import AsyncClient
from valkey_rdma.pool import Pool

ROOM = 20 * WINDOW


@pytest.mark.parametrize("slice_length", [1000, 8 * WINDOW, 8 * WINDOW + 1, 2 * ROOM])
def test_values_lie_across_cuts(client, slice_length):
    arena = bytearray(2 * ROOM + 100)
    client.register(arena, slice_length=slice_length)
    assert client.registrations == 1, "it is one buffer, however it is cut"
    sent, received = memoryview(arena)[1 : 1 + ROOM], memoryview(arena)[-ROOM:]
    sent[:] = pattern(ROOM)
    client.set_from("key", sent)
    assert client.get_into("key", received) == ROOM
    assert received == sent
    counts = client.counts
    if counts.bytes_lent:
        assert (counts.bytes_lent, counts.bytes_landed + counts.bytes_copied) == (ROOM, ROOM)
        touched = ROOM // slice_length + 2
        assert counts.bytes_landed >= ROOM - 2 * WINDOW * touched, counts
    client.unregister(arena)
    assert client.registrations == 0
    sent.release()
    received.release()
    arena.append(0)  # nothing keeps it


def test_a_slice_has_bytes(client):
    arena = bytearray(10)
    with pytest.raises(ValueError, match="at least one byte"):
        client.register(arena, slice_length=0)
    with pytest.raises(OverflowError):
        client.register(arena, slice_length=-1)
    assert client.registrations == 0


def test_pools_and_tasks_cut_too(url):
    arena = bytearray(pattern(ROOM))

    async def there_and_back():
        async with await AsyncClient.connect(url, window=WINDOW) as client:
            await client.register(arena, slice_length=3 * WINDOW)
            await client.set_from("key", arena)
            arena[:] = bytes(ROOM)
            assert await client.get_into("key", arena) == ROOM

    asyncio.run(there_and_back())
    assert arena == pattern(ROOM)
    pool = Pool(url, 2, window=WINDOW)
    try:
        pool.register(arena, slice_length=3 * WINDOW)
    finally:
        pool.close()
