#!/usr/bin/env python3
"""What replication costs over RDMA and over TCP, and a replica by valkey-rdma-sync, in one run, on softrdma.

    replication_cost.py SERVER MODULE SOFTRDMA FOLDER BENCHMARK SYNC [ROUNDS]

`valkey/module/test replication-cost` runs it. Processor times are those of the servers' processes, and of the two of valkey-rdma-sync. That
of softrdma's fabric, which a machine with a device does not have, is in none of them. The column `all` is what all processors of the machine
did, which includes what the kernel does for no process.

`LAB_ICOUNT=1 lab/run replication` runs it in the guest, on soft-RoCE: SOFTRDMA and SYNC are empty, and there is less of everything. Time is a
count of instructions there.
"""

import os
import statistics
import subprocess
import sys
import time

from resp import Client
from servers import SOFTRDMA, Server, same, stop_all, within

BENCHMARK, SYNC = sys.argv[5:7]
ROUNDS = int(sys.argv[7]) if len(sys.argv) > 7 else 3
ADDRESS = "127.0.0.1" if SOFTRDMA else os.environ["LAB_IP4"]
SETS, VALUES, WAITS = (100_000, 10_000, 500) if SOFTRDMA else (20_000, 1000, 100)


def processor(server):
    """Seconds of the threads of the process, and of its children that have ended."""
    own = 0
    for task in os.listdir(f"/proc/{server.process.pid}/task"):
        with open(f"/proc/{server.process.pid}/task/{task}/schedstat") as stat:
            own += int(stat.read().split()[0])
    with open(f"/proc/{server.process.pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return own / 1e9, (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def busy():
    """Seconds in which the machine's processors were not idle."""
    with open("/proc/uptime") as uptime:
        since, idle = map(float, uptime.read().split())
    return since * os.cpu_count() - idle


def measured(primary, replica, what):
    before = [processor(one) for one in (primary, replica)]
    begun, busy_before = time.monotonic(), busy()
    programs = what()
    seconds, busy_for = time.monotonic() - begun, busy() - busy_before
    # A child counts when it has ended.
    within(60, lambda: primary.info("rdb_bgsave_in_progress") == 0, "the end of a child")
    after = [processor(one) for one in (primary, replica)]
    row = {
        "s": seconds,
        "all": busy_for,
        "primary": after[0][0] - before[0][0],
        "child": after[0][1] - before[0][1],
        "publish": 0,
        "replica": after[1][0] - before[1][0],
        "pull": 0,
    }
    return row | dict(zip(("publish", "pull"), programs or ()))


def in_step(primary, replica):
    within(300, lambda: replica.info("master_repl_offset") == primary.info("master_repl_offset"), "the same offset")


def stream(primary, replica):
    subprocess.run([BENCHMARK, "-s", primary.path, "-t", "set", "-n", str(SETS), "-d", "1024", "-r", "20000", "-P", "16", "-c", "4", "-q"],
                   check=True, stdout=subprocess.DEVNULL)
    if replica:
        in_step(primary, replica)


def program(address, *words):
    """One of valkey-rdma-sync, which says on standard error what it does."""
    command = [SOFTRDMA, "run", "--address", address, "--", SYNC, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(process):
    """Waits until it ends, and returns its processor seconds."""
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, said
    return used.ru_utime + used.ru_stime


def synced(primary, target):
    """Builds the target by valkey-rdma-sync, and returns the processor seconds of its two programs."""
    publish = program("192.0.2.21", "publish", "--bind", "192.0.2.21:7400", "--readers", "1", "--from", f"valkey://127.0.0.1:{primary.port}")
    said = ""
    while "publishing on" not in said:
        line = publish.stderr.readline()
        assert line, said
        said += line
    pull = program("192.0.2.22", "pull", "192.0.2.21:7400", "--replace", "--into", f"valkey://127.0.0.1:{target.port}")
    return [ended(publish), ended(pull)]


def one_at_a_time(primary):
    client, times = Client(primary.path), []
    for number in range(WAITS):
        begun = time.monotonic()
        client.send("SET", "waited", number)
        client.reply()
        client.send("WAIT", 1, 60_000)
        assert client.reply() == 1
        times.append(time.monotonic() - begun)
    return statistics.median(times)


def servers():
    primary = Server(ADDRESS, "--repl-backlog-size", "512mb", tcp=7061)
    replicas = {}
    for how, port in ("RDMA", 7062), ("TCP", 7063), ("sync", 7064):
        if how != "sync" or SYNC:
            replicas[how] = Server(ADDRESS, replication="yes" if how == "RDMA" else "no", tcp=port)
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
    for how in "RDMA", "sync":
        if how in results:
            ratios = (f"{results[how][one] / results['TCP'][one]:.2f}" if results["TCP"][one] else "" for one in columns)
            print(f"| {how} ÷ TCP | " + " | ".join(ratios) + " |")
    sys.stdout.flush()


def main():
    primary, replicas = servers()
    streams, waits = {"RDMA": [], "TCP": [], "none": []}, {"RDMA": [], "TCP": []}
    for _ in range(ROUNDS):
        for how in "RDMA", "TCP":
            replica = replicas[how]
            attached(primary, replica)
            assert replica.info("rdma_engine_links") == (how == "RDMA")
            streams[how].append(measured(primary, replica, lambda: stream(primary, replica)))
            waits[how].append({"ms": one_at_a_time(primary) * 1000})
            same(primary, replica)
            replica("REPLICAOF", "NO", "ONE")
        streams["none"].append(measured(primary, primary, lambda: stream(primary, None)))
    table(f"{SETS} SETs of 1 KiB", {how: medians(rows) for how, rows in streams.items()}, ["s", "all", "primary", "replica"])
    table("SET and WAIT, one at a time", {how: medians(rows) for how, rows in waits.items()}, ["ms"])
    primary("FLUSHALL")
    for number in range(VALUES):
        primary("SET", f"value:{number}", os.urandom(100_000))
    for load in "disabled", "swapdb":
        syncs = {how: [] for how in replicas}
        for _ in range(ROUNDS):
            for how, replica in replicas.items():
                replica("FLUSHALL")
                replica.config(repl_diskless_load=load)
                build = synced if how == "sync" else attached
                row = measured(primary, replica, lambda: build(primary, replica))
                row["source"], row["target"] = row["primary"] + row["child"] + row["publish"], row["replica"] + row["pull"]
                syncs[how].append(row)
                print(f"{how}, {load}: " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()), file=sys.stderr, flush=True)
                same(primary, replica)
                replica("REPLICAOF", "NO", "ONE")
        table(f"full sync of {VALUES // 10} MB, repl-diskless-load {load}", {how: medians(rows) for how, rows in syncs.items()},
              ["s", "all", "source", "primary", "child", "publish", "target", "replica", "pull"])


try:
    main()
finally:
    stop_all()
