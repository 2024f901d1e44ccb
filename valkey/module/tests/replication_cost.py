#!/usr/bin/env python3
"""What replication costs over RDMA and over TCP, in one run, on softrdma.

    replication_cost.py SERVER MODULE SOFTRDMA FOLDER BENCHMARK [ROUNDS]

`valkey/module/test replication-cost` runs it. Processor times are those of the servers' processes. That of softrdma's fabric, which a
machine with a device does not have, is in none of them.
"""

import os
import statistics
import subprocess
import sys
import time

from servers import Client, Server, same, stop_all, within

BENCHMARK = sys.argv[5]
ROUNDS = int(sys.argv[6]) if len(sys.argv) > 6 else 3
SETS, VALUES = 100_000, 10_000


def processor(server):
    """Seconds of the threads of the process, and of its children that have ended."""
    own = 0
    for task in os.listdir(f"/proc/{server.process.pid}/task"):
        with open(f"/proc/{server.process.pid}/task/{task}/schedstat") as stat:
            own += int(stat.read().split()[0])
    with open(f"/proc/{server.process.pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return own / 1e9, (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def measured(primary, replica, what):
    before = [processor(one) for one in (primary, replica)]
    begun = time.monotonic()
    what()
    seconds = time.monotonic() - begun
    # A child counts when it has ended.
    within(60, lambda: primary.info("rdb_bgsave_in_progress") == 0, "the end of a child")
    after = [processor(one) for one in (primary, replica)]
    return {
        "s": seconds,
        "primary": after[0][0] - before[0][0],
        "child": after[0][1] - before[0][1],
        "replica": after[1][0] - before[1][0],
    }


def in_step(primary, replica):
    within(300, lambda: replica.info("master_repl_offset") == primary.info("master_repl_offset"), "the same offset")


def stream(primary, replica):
    subprocess.run([BENCHMARK, "-s", primary.path, "-t", "set", "-n", str(SETS), "-d", "1024", "-r", "20000", "-P", "16", "-c", "4", "-q"],
                   check=True, stdout=subprocess.DEVNULL)
    if replica:
        in_step(primary, replica)


def one_at_a_time(primary, count=500):
    client, times = Client(primary.path), []
    for number in range(count):
        begun = time.monotonic()
        client.send("SET", "waited", number)
        client.reply()
        client.send("WAIT", 1, 60_000)
        assert client.reply() == 1
        times.append(time.monotonic() - begun)
    return statistics.median(times)


def servers():
    primary = Server("127.0.0.1", "--repl-backlog-size", "512mb", tcp=7061)
    replicas = {}
    for how, port in ("RDMA", 7062), ("TCP", 7063):
        replicas[how] = Server("127.0.0.1", replication="yes" if how == "RDMA" else "no", tcp=port)
    return primary, replicas


def attached(primary, replica):
    if replica.info("role") == "master":
        replica("FLUSHALL")
        replica.follow(primary)
    replica.up(300)
    in_step(primary, replica)


def medians(rows):
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def table(what, results, columns):
    print(f"\n| {what} | " + " | ".join(columns) + " |\n|---|" + "--:|" * len(columns))
    for how, rows in results.items():
        print(f"| {how} | " + " | ".join(f"{rows[column]:.3f}" for column in columns) + " |")
    if "RDMA" in results and "TCP" in results:
        print("| RDMA ÷ TCP | " + " | ".join(f"{results['RDMA'][one] / results['TCP'][one]:.2f}" if results["TCP"][one] else "" for one in columns) + " |")
    sys.stdout.flush()


def main():
    primary, replicas = servers()
    streams, waits = {"RDMA": [], "TCP": [], "none": []}, {"RDMA": [], "TCP": []}
    for _ in range(ROUNDS):
        for how, replica in replicas.items():
            attached(primary, replica)
            assert replica.info("rdma_engine_links") == (how == "RDMA")
            streams[how].append(measured(primary, replica, lambda: stream(primary, replica)))
            waits[how].append({"ms": one_at_a_time(primary) * 1000})
            same(primary, replica)
            replica("REPLICAOF", "NO", "ONE")
        streams["none"].append(measured(primary, primary, lambda: stream(primary, None)))
    table(f"{SETS} SETs of 1 KiB", {how: medians(rows) for how, rows in streams.items()}, ["s", "primary", "replica"])
    table("SET and WAIT, one at a time", {how: medians(rows) for how, rows in waits.items()}, ["ms"])
    primary("FLUSHALL")
    for number in range(VALUES):
        primary("SET", f"value:{number}", os.urandom(100_000))
    for load in "disabled", "swapdb":
        syncs = {"RDMA": [], "TCP": []}
        for _ in range(ROUNDS):
            for how, replica in replicas.items():
                replica("FLUSHALL")
                replica.config(repl_diskless_load=load)
                syncs[how].append(measured(primary, replica, lambda: attached(primary, replica)))
                same(primary, replica)
                replica("REPLICAOF", "NO", "ONE")
        table(f"full sync of 1 GB, repl-diskless-load {load}", {how: medians(rows) for how, rows in syncs.items()}, ["s", "primary", "child", "replica"])


try:
    main()
finally:
    stop_all()
