"""Gets arrays of NumPy by several tasks of asyncio, on connections that share one registration."""

import asyncio

import numpy

from valkey_rdma import AsyncClient

LAYERS, SHAPE = 8, (512, 1024)


async def main() -> None:
    """Sets one array for each layer, and gets all of them at once."""
    # Windows that are short beside the arrays, so that most of each lands.
    connecting = AsyncClient.connect("embedded://arrays", window=64 << 10)
    async with await connecting as first, await first.another() as second:
        arena = numpy.zeros((2, LAYERS, *SHAPE), dtype=numpy.float16)
        await first.register(arena)
        stored, loaded = arena
        stored[:] = numpy.random.default_rng(1).random(stored.shape)
        for number, layer in enumerate(stored):
            await first.set_from(f"layer {number}", layer)

        clients = [first, second]
        lengths = await asyncio.gather(
            *(clients[number % 2].get_into(f"layer {number}", layer) for number, layer in enumerate(loaded))
        )
        if lengths != [stored[0].nbytes] * LAYERS or not numpy.array_equal(stored, loaded):
            raise SystemExit("other arrays came back")
        for client in clients:
            print(client.counts)


asyncio.run(main())
