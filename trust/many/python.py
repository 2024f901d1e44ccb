"""Many clients of one process: python python.py HOST PORT COUNT THREADS sync|async

All of them connect, and each gets a reply while the others exist. Prints descriptors and time for each, or the text of the error that ends
them; the exit status is then 3.
"""

import asyncio
import concurrent.futures
import itertools
import os
import sys
import time

import valkey_rdma

# Seconds. A busy machine is not a limit.
PATIENCE = 120

url = f"rdma://{sys.argv[1]}:{sys.argv[2]}"
count, threads, kind = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
arguments = {"timeout": PATIENCE, "connect_timeout": PATIENCE}
made = itertools.count()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def connect(share):
    clients = []
    for _ in range(share):
        clients.append(valkey_rdma.Client(url, **arguments))
        next(made)
    return clients


def use(clients):
    for client in clients:
        assert client.exists("no such key") == 0


async def connect_async(share):
    clients = []
    for _ in range(share):
        clients.append(await valkey_rdma.AsyncClient.connect(url, **arguments))
        next(made)
    return clients


async def use_async(clients):
    assert not any(await asyncio.gather(*(client.exists("no such key") for client in clients)))


def measure(pool):
    global made
    # Each thread has a loop of its own.
    loops = [asyncio.new_event_loop() for _ in range(threads)] if kind == "async" else []

    def in_threads(sync, coroutine, values):
        if kind == "sync":
            return list(pool.map(sync, values))
        return list(pool.map(lambda loop, value: loop.run_until_complete(coroutine(value)), loops, values))

    # The first client opens what a process has once.
    first = in_threads(connect, connect_async, [1] * threads)
    in_threads(use, use_async, first)
    made = itertools.count()
    before, begun = descriptors(), time.monotonic()
    shares = [(thread + 1) * count // threads - thread * count // threads for thread in range(threads)]
    clients = in_threads(connect, connect_async, shares)
    each, open_descriptors = (time.monotonic() - begun) * 1000 / count, (descriptors() - before) / count
    in_threads(use, use_async, clients)
    print(f"{open_descriptors:.2f} descriptors and {each:.2f} ms each", flush=True)


try:
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        measure(pool)
except (valkey_rdma.Error, OSError, RuntimeError) as error:
    print(f"after {next(made)}: {error}", flush=True)
    # Not by way of the clients, whose number may be what ended this.
    os._exit(3)
