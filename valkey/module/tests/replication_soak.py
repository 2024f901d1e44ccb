#!/usr/bin/env python3
"""Replicas under cuts and kills: no write that WAIT acknowledged may be gone, and nothing may leak.

    replication_soak.py SERVER MODULE SOFTRDMA FOLDER [MINUTES]

`valkey/module/test replication-soak=60` runs it for an hour. Every 20 seconds the links of one server are cut, and every 60 seconds a server
is killed (SIGKILL), by turns the primary and one of its replicas. Nothing is kept on disk, so that what survives a primary, survives by
replication.

Three servers, A, B and C, are a primary and replicas by turns. `watcher` is a replica as well, and `last` is a replica of that. They are
never killed nor promoted, so what they hold can be compared: `watcher` has a link of its own, and accepts that of `last`.

The promise: a write is acknowledged if a WAIT for three replicas after it returned 3, or one for two returned 2. That it survives is a fair
claim by these rules, which are those of whoever operates such servers:

1. A primary that is killed is replaced by the one of the two others that has the highest offset. Of two replicas that acknowledged, one at
   least is no watcher, and no other that could be promoted has read less.
2. No server is killed before the one that was killed before is back, and all replicas have read what the primary had written then. So there
   is always more than one copy. Links may be cut at that time, and are.
3. The killed server comes back empty, without the RDB of its last synchronization. It is told whose replica it is before anybody follows it.
"""

import collections
import os
import random
import subprocess
import sys
import threading
import time

from resp import Client
from servers import MIB, SOFTRDMA, Server, attempt, fault, same, stop_all, within

MINUTES = float(sys.argv[5]) if len(sys.argv) > 5 else 1
CUT_EVERY, KILL_EVERY = 20, 60
KEYS, WRITERS = 1000, 3
SEED = int(os.environ.get("SOAK_SEED", time.time()))
chance = random.Random(SEED)


class Writer(threading.Thread):
    """Writes its own keys at whichever server is the primary. A value begins with a number that grows."""

    def __init__(self, name, servers):
        super().__init__(daemon=True)
        self.label, self.servers, self.stopped = name, servers, False
        # By key: the last number that was written, and the last one that WAIT acknowledged.
        self.written, self.acknowledged = collections.Counter(), {}
        self.writes = self.waits = self.unacknowledged = self.lost = 0
        self.failed = None
        # Held while it writes: others see no half of a batch.
        self.turn = threading.Lock()
        self.chance = random.Random(f"{SEED} {name}")

    def run(self):
        client = of = None
        while not self.stopped:
            with self.turn:
                try:
                    if client is None or of is not self.servers.primary:
                        of = self.servers.primary
                        client = Client(of.path)
                    self.batch(client)
                # The server was killed, or is a replica now.
                except (OSError, RuntimeError) as error:
                    if isinstance(error, RuntimeError) and not str(error).startswith("READONLY"):
                        self.failed = error
                        return
                    client = None
                    self.lost += 1
            time.sleep(0.002 if client else 0.05)

    def batch(self, client):
        batch = [(f"{self.label}:{self.chance.randrange(KEYS)}") for _ in range(self.chance.randrange(1, 20))]
        numbers = {}
        for key in batch:
            self.written[key] += 1
            numbers[key] = self.written[key]
            client.send("SET", key, value(key, numbers[key]))
        wanted = self.chance.choice((2, 3))
        client.send("WAIT", wanted, 1000)
        for _ in batch:
            client.reply()
        self.writes += len(batch)
        self.waits += 1
        if client.reply() >= wanted:
            self.acknowledged.update(numbers)
        else:
            self.unacknowledged += 1

    def check(self, server):
        """What the server has is no older than what was acknowledged, and no newer than what was written."""
        client = Client(server.path)
        keys = list(self.written)
        for key in keys:
            client.send("GET", key)
        for key in keys:
            found = client.reply()
            number = int(found.split(":", 1)[0]) if found else 0
            assert number >= self.acknowledged.get(key, 0), f"{key}: {number} is there, and {self.acknowledged[key]} was acknowledged"
            assert number <= self.written[key] and (not found or found == value(key, number)), f"{key}: a value that nobody wrote: {found[:40]}"
        return len(self.acknowledged)


def value(key, number):
    """Of different lengths, so that a wrong one shows."""
    return f"{number}:{key}:" + "x" * (number * 37 % 3000)


class Servers:
    """Who is whose replica, and what befalls them."""

    def __init__(self):
        self.kept = [Server(f"192.0.2.{number}") for number in (1, 2, 3)]
        self.watcher, self.last = Server("192.0.2.4"), Server("192.0.2.5")
        self.primary = self.kept[0]
        self.counts = collections.Counter()
        for one in *self.kept[1:], self.watcher:
            one.follow(self.primary)
        self.last.follow(self.watcher)
        self.in_step()

    @property
    def all(self):
        return [*self.kept, self.watcher, self.last]

    @property
    def replicas(self):
        return [one for one in self.kept if one is not self.primary]

    def in_step(self):
        """All replicas have read what the primary has written by now."""
        wanted = self.primary.info("master_repl_offset")
        for one in self.all:
            if one is not self.primary:
                within(300, lambda: one.info("master_link_status") == "up" and one.info("master_repl_offset") >= wanted, f"{one.log}: a replica in step")

    def cut(self):
        one = chance.choice(self.all)
        what = chance.choice(("queue-lost", "key-refused", "link-down=5000000", "CLIENT KILL"))
        if what == "CLIENT KILL":
            attempt(one, "CLIENT", "KILL", "TYPE", "primary")
            attempt(one, "CLIENT", "KILL", "TYPE", "replica")
        else:
            fault(one, what)
        self.counts["cuts"] += 1

    def kill_replica(self):
        self.in_step()
        one = chance.choice(self.replicas)
        one.kill()
        self.counts["replicas killed"] += 1
        time.sleep(chance.uniform(0, 5))
        self.comes_back(one)

    def comes_back(self, one):
        """As a replica, and empty."""
        if os.path.exists(f"{one.folder}/dump.rdb"):
            os.unlink(f"{one.folder}/dump.rdb")
        one.start()
        assert one("DBSIZE") == 0
        one.follow(self.primary)
        self.in_step()

    def kill_primary(self, writers):
        self.in_step()
        # Sometimes a replica has not heard the last.
        if chance.random() < 0.5:
            fault(chance.choice(self.replicas), "link-down=2000000")
            time.sleep(chance.uniform(0, 1))
        old = self.primary
        self.counts["full"] += old.info("sync_full")
        self.counts["partial"] += old.info("sync_partial_ok")
        old.kill()
        self.counts["primaries killed"] += 1
        # What has arrived is read, though the primary is gone.
        for one in self.replicas:
            within(60, lambda: one.info("master_link_status") == "down", f"{one.log}: a link that is down")
        new = max(self.replicas, key=lambda one: one.info("master_repl_offset"))
        assert new("REPLICAOF", "NO", "ONE") == "OK"
        for one in *(one for one in self.replicas if one is not new), self.watcher:
            one.follow(new)
        for writer in writers:
            writer.turn.acquire()
        try:
            self.primary = new
            for writer in writers:
                writer.check(new)
        finally:
            for writer in writers:
                writer.turn.release()
        self.comes_back(old)


Held = collections.namedtuple("Held", "descriptors domains queues pairs identifiers registered resident")


def held(server):
    """What a server has open, what the fabric has for it, registered bytes, and kilobytes of memory."""
    pid = server.process.pid
    with open(f"/proc/{pid}/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    table = subprocess.run([SOFTRDMA, "status"], check=True, capture_output=True, text=True).stdout
    row = next(line.split("|") for line in table.splitlines() if f"| {pid} " in line)
    domains, _, _, queues, pairs, identifiers = (int(one) for one in row[4:10])
    return Held(len(os.listdir(f"/proc/{pid}/fd")), domains, queues, pairs, identifiers, server.info("rdma_engine_registered_bytes"), resident)


def at_rest(servers):
    """What the two hold that live throughout, when nothing is written, and nothing of links before is left."""
    servers.in_step()
    # What is only kept for the busy goes; what a closed link keeps goes when its last bytes are delivered.
    looks, until = [], time.monotonic() + 120
    while time.monotonic() < until:
        looks.append([held(one) for one in (servers.watcher, servers.last)])
        if len(looks) > 3 and all([one[:-1] for one in look] == [one[:-1] for one in looks[-1]] for look in looks[-4:]):
            break
        time.sleep(2)
    return looks[-1]


def main():
    servers = Servers()
    writers = [Writer(f"w{number}", servers) for number in range(WRITERS)]
    print(f"seed {SEED}", flush=True)
    for one in writers:
        one.start()
    begun = time.monotonic()
    before, residents, next_cut, next_kill, turn = None, [], begun + CUT_EVERY, begun + KILL_EVERY, 0
    while (now := time.monotonic()) < begun + 60 * MINUTES or before is None:
        if now >= next_cut:
            next_cut += CUT_EVERY
            servers.cut()
        if now >= next_kill:
            next_kill += KILL_EVERY
            servers.kill_replica() if turn % 2 else servers.kill_primary(writers)
            turn += 1
            residents.append([held(one).resident for one in (servers.watcher, servers.last)])
            said = ", ".join(f"{what}: {count}" for what, count in servers.counts.items())
            print(f"{now - begun:.0f} s: {sum(one.writes for one in writers)} writes, {sum(one.unacknowledged for one in writers)} of "
                  f"{sum(one.waits for one in writers)} WAITs without enough replicas; {said}; resident: {residents[-1]}", flush=True)
        if before is None and now > begun + CUT_EVERY:
            # After the first cut, all that is made once is made.
            for writer in writers:
                writer.turn.acquire()
            before = at_rest(servers)
            for writer in writers:
                writer.turn.release()
        assert not any(one.failed for one in writers), [one.failed for one in writers]
        time.sleep(0.1)
    for one in writers:
        one.stopped = True
        one.join()
    servers.in_step()
    keys = sum(one.check(servers.primary) for one in writers)
    same(*servers.all)
    after = at_rest(servers)
    writes, waits, bare = (sum(getattr(one, what) for one in writers) for what in ("writes", "waits", "unacknowledged"))
    full = servers.counts["full"] + servers.primary.info("sync_full")
    partial = servers.counts["partial"] + servers.primary.info("sync_partial_ok")
    print(f"{MINUTES:g} minutes: {writes} writes, {waits - bare} WAITs acknowledged, {bare} not, {servers.counts['cuts']} cuts, "
          f"{servers.counts['primaries killed']} primaries and {servers.counts['replicas killed']} replicas killed; full synchronizations: {full}, "
          f"partial: {partial}; {servers.watcher.info('rdma_engine_links_made')} links of the watcher's; {keys} keys with acknowledged values, none older; "
          f"resident kB of both: {residents[:1]} first, {residents[-1:]} last", flush=True)
    for name, first, second in zip(("watcher", "last"), before, after):
        print(f"{name}: {first} at first, {second} at the end", flush=True)
        # A connection keeps its send buffer for a while: there may be one more.
        assert second[:-2] == first[:-2] and second.registered <= first.registered + 2 * MIB, name
    # As lab/run soak has it.
    half = len(residents) // 2
    for which, name in enumerate(("watcher", "last")):
        early, late = (max((one[which] for one in part), default=0) for part in (residents[:half], residents[half:]))
        assert not half or late <= early * 1.25 + 16 * 1024, f"{name}: {early} kB at most in the first half, {late} in the second"
    assert waits > bare


try:
    main()
except BaseException:
    print(f"SOAK_SEED={SEED}", file=sys.stderr)
    for one in Server.all:
        with open(one.log, errors="replace") as log:
            print(f"== {one.log}\n" + "".join(log.readlines()[-15:]), file=sys.stderr)
    raise
finally:
    stop_all()
