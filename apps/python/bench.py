"""Times SET and GET of large values beside valkey-benchmark and redis-py, at the server that VALKEY_URL names, and prints a table.

`lab/run guest apps/python/valkey bench` runs it.
"""

import argparse
import csv
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial

import redis

import valkey_rdma

MIB = 1 << 20


def timed(turns: int, act: Callable[[], object]) -> float:
    """Return the median of how many milliseconds `act` takes, after one that warms up."""
    act()
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        act()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def show(mib: int, name: str, put: float, get: float) -> None:
    """Print a line of the table."""
    print(f"{mib:>4}  {name:<36}{put:>9.2f}{get:>9.2f}", flush=True)


def of_valkey(host: str, port: str, turns: int, length: int) -> list[float]:
    """Return how many milliseconds SET and GET of valkey-benchmark take, over RDMA, on one connection.

    That is the mean: its latencies end with the first bytes of a reply.
    """
    program = os.path.join(os.environ["VALKEY_BIN"], "valkey-benchmark")
    command = [program, "--rdma", "-h", host, "-p", port, "-c", "1", "-n", str(turns), "-d", str(length)]
    printed = subprocess.run([*command, "-t", "set,get", "--csv"], check=True, capture_output=True, text=True)
    means = {row["test"]: 1e3 / float(row["rps"]) for row in csv.DictReader(printed.stdout.splitlines())}
    return [means["SET"], means["GET"]]


def main() -> None:
    """Measure each client with each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 32], help="lengths of values")
    parser.add_argument("--turns", type=int, default=9, help="how often each is timed")
    arguments = parser.parse_args()
    host, port = os.environ["VALKEY_URL"].removeprefix("rdma://").rsplit(":", 1)
    rdma = valkey_rdma.Client(f"rdma://{host}:{port}")
    tcp = valkey_rdma.Client(f"tcp://{host}:{port}")
    other = redis.Redis(host, int(port))
    print(
        f"valkey-rdma {valkey_rdma.__version__}, redis-py {redis.__version__}; median of {arguments.turns}, ms"
    )
    print(f"{'MiB':>4}  {'client':<36}{'SET':>9}{'GET':>9}")
    for mib in arguments.mib:
        value = os.urandom(MIB) * mib
        arena, plain = bytearray(value), bytearray(value)
        rdma.register(arena)
        rows = [
            (
                "RDMA, registered buffer",
                partial(rdma.set_from, "key", arena),
                partial(rdma.get_into, "key", arena),
            ),
            (
                "RDMA, buffer as it is",
                partial(rdma.set_from, "key", plain),
                partial(rdma.get_into, "key", plain),
            ),
            (
                "TCP, the calls of this package",
                partial(tcp.set_from, "key", plain),
                partial(tcp.get_into, "key", plain),
            ),
            ("TCP, redis-py, new bytes", partial(other.set, "key", value), partial(other.get, "key")),
        ]
        show(mib, "RDMA, valkey-benchmark, keeps none", *of_valkey(host, port, arguments.turns, mib * MIB))
        for name, put, get in rows:
            show(mib, name, timed(arguments.turns, put), timed(arguments.turns, get))
            if not arena == plain == value:
                raise SystemExit("other bytes came back")
        rdma.unregister(arena)


main()
