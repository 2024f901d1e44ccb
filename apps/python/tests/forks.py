"""A program that forks: python forks.py URL DEED PARENT FACE

FACE is `client`, `async` or `pool`, DEED what the child does, PARENT whether a thread of the parent is in a call (`busy`) or not (`idle`).
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading

import pytest

import valkey_rdma
from valkey_rdma.pool import Pool

LONG = 600
# A child that hangs ends by it, and fails its parent.
WAIT = 60

url, deed, busy, face = sys.argv[1], sys.argv[2], sys.argv[3] == "busy", sys.argv[4]
arguments = {"timeout": LONG, "connect_timeout": LONG}
# What the parent has, and the child a copy of.
has = {}


def refused():
    return pytest.raises(valkey_rdma.Closed, match="forked child")


def child(use):
    """Does the deed, and ends the child unless it returns."""
    signal.alarm(WAIT)
    if deed == "_exit":
        os._exit(0)
    elif deed == "close":
        closing = has["one"].close()
        if closing is not None:
            asyncio.run(closing)
    elif deed == "use":
        use()
        with contextlib.suppress(valkey_rdma.ConnectError):
            valkey_rdma.Client(url, **arguments)
            assert url.startswith("tcp:"), "a child has a device of its parent's"
    elif deed == "drop":
        has.clear()
        gc.collect()
    elif deed == "exec":
        os.execv("/bin/true", ["true"])
    elif deed == "return":
        return
    sys.exit(0)


def fork(use):
    """Forks. Returns whether this is the parent, after the child's end."""
    if deed == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=use)
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
        return True
    pid = os.fork()
    if pid == 0:
        child(use)
        return False
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child that should {deed}: {status}"
    return True


def fork_beside(work, use):
    """Forks like `fork`. Meanwhile a thread of the parent is in `work`, if the parent is to be busy."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=[stop], daemon=True)
    if busy:
        thread.start()
    if not fork(use):
        return False
    stop.set()
    if busy:
        thread.join()
    return True


def commands(one):
    one.set("key", b"value")
    assert one.get("key") == b"value"


def client():
    has["one"] = valkey_rdma.Client(url, **arguments)
    arena = bytearray(1 << 20)
    has["one"].register(arena)
    commands(has["one"])

    def use():
        one = has["one"]
        for call in (
            lambda: one.get("key"),
            lambda: one.set("key", b"child"),
            lambda: one.register(bytearray(64)),
            lambda: one.unregister(arena),
            one.another,
            lambda: one.counts,
            lambda: one.registrations,
        ):
            with refused():
                call()

    def work(stop):
        # In a call nearly always, with the client's locks.
        while not stop.is_set():
            commands(has["one"])

    if not fork_beside(work, use):
        return False
    commands(has["one"])
    assert has["one"].get_into("key", arena) == 5
    has["one"].close()
    return True


def pool():
    has["one"] = Pool(url, 2, **arguments)
    has["one"].call(commands)

    def use():
        with refused():
            has["one"].call(commands)
        results = []
        has["one"].submit([commands], results.extend)
        assert isinstance(results[0], valkey_rdma.Closed), results

    results, done = [], threading.Event()

    def ended(each):
        results.extend(each)
        done.set()

    if busy:
        has["one"].submit([commands] * 200, ended)
    if not fork(use):
        return False
    assert not busy or done.wait(LONG)
    assert set(results) <= {None}, results
    has["one"].call(commands)
    has["one"].close()
    return True


def asynchronous():
    # Outside of a running event loop. A child of one shares what it waits for with its parent.
    has["one"] = asyncio.run(valkey_rdma.AsyncClient.connect(url, **arguments))

    async def set_and_get():
        await has["one"].set("key", b"value")
        assert await has["one"].get("key") == b"value"

    async def used():
        with refused():
            await has["one"].get("key")
        await has["one"].close()

    def use():
        asyncio.run(used())

    async def work(stop):
        while not stop.is_set():
            await set_and_get()

    if not fork_beside(lambda stop: asyncio.run(work(stop)), use):
        return False
    asyncio.run(set_and_get())
    asyncio.run(has["one"].close())
    return True


faces = {"client": client, "pool": pool, "async": asynchronous}
if faces[face]():
    print("done")
