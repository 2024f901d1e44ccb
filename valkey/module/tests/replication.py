#!/usr/bin/env python3
"""Replication over RDMA between servers with the module, on softrdma or on a device.

    replication.py SERVER MODULE SOFTRDMA FOLDER [SECONDS] [STEP…]

`valkey/module/test replication` runs it. With SECONDS, connections are cut for so long, there is more data, and steps of minutes
are run, too. A primary without a port of TCP is one that nothing but RDMA reaches. Without SOFTRDMA, which is '' then, servers use the
machine's device, at its address LAB_IP4: `one_address` is the step for that, and lab/run test replication runs it in the guest.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

from resp import Client
from replication_cluster import cluster, sentinel
from servers import FOLDER, MIB, SERVER, Server, attempt, cut, fault, same, stop_all, within

SECONDS = int(sys.argv[5]) if len(sys.argv) > 5 and sys.argv[5].isdigit() else 0
NAMED = [one for one in sys.argv[5:] if not one.isdigit()]


def pair(*options, **how):
    primary = Server("192.0.2.1", *options, **how)
    replica = Server("192.0.2.2", *options, **how)
    return primary, replica


def modes():
    """A full synchronization in each mode; and with `no`, none."""
    primary, replica = pair()
    primary("DEBUG", "POPULATE", 100_000 if SECONDS else 20_000, "key", 1000)
    full = 0
    for diskless in "yes", "no":
        for load in "disabled", "flush-before-load", "swapdb":
            primary.config(repl_diskless_sync=diskless)
            replica.config(repl_diskless_load=load)
            replica("REPLICAOF", "NO", "ONE")
            replica("FLUSHALL")
            replica.follow(primary)
            replica.up()
            same(primary, replica)
            full += 1
            assert primary.info("sync_full") == full, (diskless, load)
            assert replica.info("rdma_engine_links_made") == full and replica.info("rdma_engine_links") == 1
            assert primary.info("rdma_engine_connections") >= 1
    if SECONDS:
        primary("SETRANGE", "long", 150 * MIB, "x")
        same(primary, replica)
    replica("REPLICAOF", "NO", "ONE")
    assert replica("CONFIG", "SET", "rdma_engine.replication", "no") == "OK"
    replica.follow(primary)
    # Over TCP nothing is there.
    within(60, lambda: replica.says("Error condition on socket for SYNC") or replica.says("Unable to connect to PRIMARY")
           or replica.info("master_link_down_since_seconds") > 3, "a link that is down")
    assert replica.info("master_link_status") == "down" and replica.info("rdma_engine_links") == 0
    assert replica("CONFIG", "SET", "rdma_engine.replication", "yes") == "OK"
    replica("REPLICAOF", "NO", "ONE")
    replica.follow(primary)
    replica.up()
    same(primary, replica)


class Writer:
    """Writes and counts until it is stopped, through a connection of its own."""

    def __init__(self, server):
        self.client, self.stopped, self.written = Client(server.path), False, 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.stopped:
            for _ in range(20):
                self.written += 1
                self.client.send("SET", f"key:{random.randrange(2000)}", os.urandom(700).hex())
                self.client.send("INCR", "count")
            for _ in range(40):
                self.client.reply()
            # The backlog has what is written while a link is down.
            time.sleep(0.005)

    def stop(self):
        self.stopped = True
        self.thread.join()


def cuts():
    """Connections that are cut under writes: each time a partial synchronization."""
    primary, replica = pair("--io-threads", 2 if SECONDS else 1, "--repl-backlog-size", "512mb")
    replica.follow(primary)
    replica.up()
    writer = Writer(primary)
    # These end connections; a link that is down for so long outlasts the retries.
    kinds = [lambda: primary("CLIENT", "KILL", "TYPE", "replica"), lambda: cut(replica)]
    for one in "queue-lost", "key-refused":
        for server in primary, replica:
            kinds.append(lambda server=server, one=one: fault(server, one))
    kinds.append(lambda: fault(random.choice((primary, replica)), "link-down=8000000"))
    ends = len(kinds)
    # These may not.
    for one in "not-ready=3", "spurious":
        kinds.append(lambda one=one: fault(random.choice((primary, replica)), one))
    until, done = time.monotonic() + SECONDS, 0
    while done < len(kinds) or time.monotonic() < until:
        made, before = replica.info("rdma_engine_links_made"), writer.written
        which = done if done < len(kinds) else random.randrange(len(kinds))
        kinds[which]()
        if which < ends:
            within(60, lambda: replica.info("rdma_engine_links_made") > made, f"a link after cut {which}")
        done += 1
        replica.up()
        within(60, lambda: writer.written > before, "writes")
    writer.stop()
    same(primary, replica)
    assert replica("GET", "count") == str(writer.written)
    partial = primary.info("sync_partial_ok")
    assert primary.info("sync_full") == 1 and partial >= ends, (primary.info("sync_full"), partial)
    print(f"{done} faults, {partial} partial synchronizations, {writer.written} writes")


def roles():
    """A chain, WAIT, FAILOVER, and a primary that is killed."""
    primary, replica = pair()
    last = Server("192.0.2.3")
    primary("DEBUG", "POPULATE", 2000, "key", 100)
    replica.follow(primary)
    last.follow(replica)
    replica.up()
    last.up()
    primary("SET", "a", 1)
    assert primary("WAIT", 1, 60_000) == 1
    same(primary, replica, last)
    assert primary("FAILOVER", "TO", replica.address, replica.port, "TIMEOUT", 60_000) == "OK"
    within(90, lambda: replica.info("role") == "master" and primary.info("role") == "slave", "a failover")
    primary.up()
    last.up()
    replica("SET", "b", 2)
    same(primary, replica, last)
    # It had no full one: the old primary has continued.
    assert replica.info("sync_full") <= 1
    replica.kill()
    within(60, lambda: primary.info("master_link_status") == "down", "a link that is down")
    primary("REPLICAOF", "NO", "ONE")
    last.follow(primary)
    primary("SET", "c", 3)
    replica.start()
    replica.follow(primary)
    replica.up()
    last.up()
    same(primary, replica, last)
    last.kill()
    assert primary("SET", "d", 4) == "OK"
    within(60, lambda: primary.info("connected_slaves") == 1, "a replica less")
    # The last acknowledgements of a replica that is shut down leave; what it holds goes.
    replica.kill(signal.SIGTERM)
    within(60, lambda: primary.info("connected_slaves") == 0, "no replica")


def one_address():
    """Full and partial synchronizations and a failover, between servers at one address that has no port of TCP."""
    address = os.environ.get("LAB_IP4", "192.0.2.1")
    one = Server(address, port=7931)
    other = Server(address, port=7932)
    one("DEBUG", "POPULATE", 5000, "key", 1000)
    for load in "disabled", "swapdb":
        full = one.info("sync_full")
        other.config(repl_diskless_load=load)
        other("REPLICAOF", "NO", "ONE")
        other("FLUSHALL")
        other.follow(one)
        other.up()
        same(one, other)
        assert one.info("sync_full") > full, load
    full = one.info("sync_full")
    for end in (lambda: one("CLIENT", "KILL", "TYPE", "replica")), (lambda: cut(other)):
        made, partial = other.info("rdma_engine_links_made"), one.info("sync_partial_ok")
        end()
        for key in range(200):
            one("SET", f"after:{made}:{key}", "x" * 3000)
        within(60, lambda: other.info("rdma_engine_links_made") > made, "another link")
        other.up()
        same(one, other)
        assert one.info("sync_partial_ok") > partial and one.info("sync_full") == full
    assert one("FAILOVER", "TO", address, other.port, "TIMEOUT", 60_000) == "OK"
    within(90, lambda: other.info("role") == "master" and one.info("role") == "slave", "a failover")
    one.up()
    other("SET", "after", "the failover")
    assert other("WAIT", 1, 60_000) == 1
    same(one, other)
    assert other.info("sync_full") == 0 and other.info("sync_partial_ok") > 0
    # Each side counts: what one has made is what the other has accepted.
    made = [server.info("rdma_engine_links_made") for server in (other, one)]
    accepted = [server.info("rdma_engine_accepted") for server in (one, other)]
    assert made[0] >= 4 and made[1] >= 1 and accepted[0] >= made[0] and accepted[1] >= made[1], (made, accepted)
    partial = one.info("sync_partial_ok") + other.info("sync_partial_ok")
    print(f"{full} full synchronizations, {partial} partial ones; links over RDMA, as replicas and primaries count: {made}, {accepted}")


def prefer():
    """RDMA where the primary has it, else TCP. One address is that of both."""
    primary = Server("127.0.0.1", "--rdma-port", 0, tcp=7011)
    replica = Server("127.0.0.1", replication="prefer", tcp=7012)
    primary("DEBUG", "POPULATE", 1000, "key", 100)
    for _ in range(2):
        replica.follow(primary)
        replica.up()
        same(primary, replica)
        assert replica.info("rdma_engine_links") == 0 and primary.info("rdma_engine_accepted") in (None, 0)
        replica("REPLICAOF", "NO", "ONE")
    assert replica.info("rdma_engine_links_fell_back") == 2
    with open(replica.log) as log:
        assert log.read().count("goes over TCP, because the RDMA connection failed") == 1
    primary.config(rdma_port=7011)
    replica.follow(primary)
    replica.up()
    same(primary, replica)
    assert replica.info("rdma_engine_links") == 1 and replica.info("rdma_engine_links_made") == 1, [replica.info("rdma_engine_links_made")]


def names():
    """A name for an address, a source, other ports, and a login."""
    primary = Server("127.0.0.1", "--rdma-port", 7022, tcp=7021)
    replica = Server("127.0.0.1", "--rdma_engine.replication-port-offset", 1, tcp=7023)
    primary("SET", "a", 1)
    assert primary("ACL", "SETUSER", "replica", "on", ">secret", "+psync", "+replconf", "+ping") == "OK"
    primary("CONFIG", "SET", "requirepass", "other")
    replica("REPLICAOF", "localhost", 7021)
    within(60, lambda: replica.says("NOAUTH"), "a login that is missing")
    replica.config(primaryuser="replica", primaryauth="secret")
    replica.up()
    same(primary, replica)
    assert replica.info("rdma_engine_links") == 1
    # A port that is none.
    replica("REPLICAOF", "NO", "ONE")
    replica("CONFIG", "SET", "rdma_engine.replication-port-offset", 65535)
    replica.follow(primary)
    within(60, lambda: replica.says("with rdma_engine.replication-port-offset, is no port"), "a port that is none")
    stop_all()
    # Of two addresses the one that is named, in either family.
    primary = Server("192.0.2.1,2001:db8::1")
    replica = Server("192.0.2.2,192.0.2.3,2001:db8::2", "--bind-source-addr", "192.0.2.3")
    primary("SET", "a", 1)
    replica.follow(primary)
    replica.up()
    assert "ip=192.0.2.3," in primary.info("slave0"), primary.info("slave0")
    replica("REPLICAOF", "2001:db8::1", 6379)
    within(60, lambda: replica.says("bind-source-addr 192.0.2.3 has no address of this family"), "a family that differs")
    replica.config(bind_source_addr="2001:db8::2")
    replica.up()
    assert "ip=2001:db8::2," in primary.info("slave0"), primary.info("slave0")
    same(primary, replica)


def waits():
    """A replica whose primary sends a newline now and then, before it begins, serves its clients meanwhile."""
    primary, replica = pair("--repl-diskless-sync-delay", 1000)
    replica.follow(primary)
    within(60, lambda: "wait_bgsave" in str(primary.info("slave0")), "a replica that waits")
    newlines = time.monotonic() + 1.5
    while time.monotonic() < newlines:
        replica("PING")
    primary.process.send_signal(signal.SIGSTOP)
    # A handler that was called too early would wait for five seconds, and then give up.
    until = time.monotonic() + 5.5
    while time.monotonic() < until:
        replica("PING")
    assert not replica.says("Failed to read response from the server") and replica.info("rdma_engine_links_made") == 1
    primary.process.send_signal(signal.SIGCONT)
    primary.config(repl_diskless_sync_delay=0)
    replica.up()


def channels():
    """With two channels allowed on both sides, one is used."""
    primary, replica = pair("--dual-channel-replication-enabled", "yes")
    primary("DEBUG", "POPULATE", 1000, "key", 100)
    replica.follow(primary)
    replica.up()
    same(primary, replica)
    assert primary.info("sync_full") == 1


def stopped():
    """A primary that is stopped while it sends: the replica gives up, as it does over TCP."""
    # The child takes half a minute, and all replicas read from it before that.
    primary = Server("127.0.0.1", "--rdb-key-save-delay", 1500, "--repl-ping-replica-period", 1, tcp=7031)
    primary("DEBUG", "POPULATE", 20_000, "key", 1000)
    replicas = {}
    for load in ("disabled", "flush-before-load", "swapdb") if SECONDS else ("disabled", "swapdb"):
        for how in "yes", "no":
            number = len(replicas) + 2
            options = ["--repl-timeout", 3, "--repl-diskless-load", load]
            replicas[load, how] = Server("127.0.0.1", *options, replication=how, tcp=7031 + number)
    # All of them read the same child.
    primary.config(repl_diskless_sync_delay=60, repl_diskless_sync_max_replicas=len(replicas))
    began = "MASTER <-> REPLICA sync: ", "PRIMARY <-> REPLICA sync: "
    for one in replicas.values():
        one.follow(primary)
    for one in replicas.values():
        within(60, lambda: any(one.says(word + "receiving") for word in began), f"{one.log}: a synchronization")
    within(60, lambda: primary.info("rdb_bgsave_in_progress") == 1, "a child that saves")
    primary.process.send_signal(signal.SIGSTOP)
    begun, took = time.monotonic(), {}

    def all_gave_up():
        for which, one in replicas.items():
            if which not in took and (one.says("Timeout receiving bulk data") or one.says("I/O error trying to sync")
                                      or one.says("Failed trying to load the PRIMARY synchronization DB")
                                      or one.says("Timeout connecting to the PRIMARY")):
                took[which] = time.monotonic() - begun
        return len(took) == len(replicas)

    within(120, all_gave_up, f"replicas that give up: {took}")
    for (load, how), seconds in took.items():
        print(f"{'RDMA' if how == 'yes' else 'TCP'}, repl-diskless-load {load}: gave up after {seconds:.1f} s")
    for one in replicas.values():
        one("REPLICAOF", "NO", "ONE")
    primary.process.send_signal(signal.SIGCONT)
    primary.config(rdb_key_save_delay=0, repl_diskless_sync_delay=0)
    for (_, how), one in replicas.items():
        one.follow(primary)
        one.up()
        assert one.info("rdma_engine_links") == (1 if how == "yes" else 0)
    same(primary, *replicas.values())


def again():
    """What is lost on the way is sent again: a child that is killed, a backlog that is too short, a buffer that is full."""
    primary, replica = pair("--repl-backlog-size", "16kb")
    primary("DEBUG", "POPULATE", 20_000, "key", 1000)
    # It would take ten minutes, and is killed.
    primary.config(rdb_key_save_delay=30_000)
    replica.follow(primary)
    within(60, lambda: replica.says("receiving"), "a synchronization")
    primary.config(rdb_key_save_delay=0)
    children = subprocess.run(["pgrep", "-P", str(primary.process.pid), "-f", "rdb"], capture_output=True, text=True, check=True).stdout.split()
    for one in children:
        os.kill(int(one), signal.SIGKILL)
    replica.up()
    same(primary, replica)
    full = primary.info("sync_full")
    assert full >= 2
    # The replica stands still, and the primary does not keep all that it should read.
    replica.process.send_signal(signal.SIGSTOP)
    primary.config(client_output_buffer_limit="replica 1mb 0 0")
    for number in range(20):
        primary("SET", f"large:{number}", "x" * MIB)
    within(60, lambda: primary.info("connected_slaves") == 0, "a replica that is dropped")
    replica.process.send_signal(signal.SIGCONT)
    primary.config(client_output_buffer_limit="replica 256mb 64mb 60")
    within(60, lambda: primary.info("sync_full") > full, "another full synchronization")
    replica.up()
    same(primary, replica)
    # Nothing is lost while either side does nothing for longer than a keepalive.
    for server in (primary, replica) if SECONDS else ():
        full, made = primary.info("sync_full"), replica.info("rdma_engine_links_made")
        server("DEBUG", "SLEEP", 4)
        primary("INCR", "awake")
        same(primary, replica)
        assert (primary.info("sync_full"), replica.info("rdma_engine_links_made")) == (full, made), server.log


def refused():
    """Where the module may not, or cannot, take links, it says why, and the server starts."""
    text = "RDMA: replication does not go over RDMA: "
    # TLS, as far as the module sees it: a type of its own, whose connections go through the table of TCP.
    primary = Server("127.0.0.1", tcp=7043)
    one = Server("127.0.0.1", "--loadmodule", f"{FOLDER}/as-tls.so", "--tls-replication", "yes", tcp=7044)
    assert one.says(text + "tls-replication is yes") and one("CONFIG", "GET", "rdma_engine.replication")[1] == "no"
    assert "not encrypted" in attempt(one, "CONFIG", "SET", "rdma_engine.replication", "prefer")
    one.follow(primary)
    one.up()
    assert one.info("rdma_engine_links_made") == 0
    one.config(tls_replication="no")
    assert one("CONFIG", "SET", "rdma_engine.replication", "yes") == "OK"
    cut(one)
    within(60, lambda: one.info("rdma_engine_links") == 1, "a link over RDMA")
    one.config(tls_replication="yes")
    cut(one)
    within(60, lambda: one.says("goes over TLS, because tls-replication is yes"), "a link over TLS")
    one.up()
    assert one.info("rdma_engine_links") == 0
    stop_all()
    # A server that does not export what replication calls.
    other = f"{FOLDER}/other-server"
    with open(SERVER, "rb") as program:
        text_of = program.read()
    with open(other, "wb") as program:
        program.write(text_of.replace(b"\0syncWithPrimary\0", b"\0syncWithPrimarX\0"))
    os.chmod(other, 0o755)
    one = Server("127.0.0.1", program=other, tcp=7041)
    assert one.says(text + "the server's program exports no syncWithPrimary")
    # A module that was there before, of which the log says where it is; and a table that cannot be changed.
    reasons = {
        "takes-connect": "the connections of TCP are those of another module already: ",
        "read-only-table": "the server's table for TCP is read-only",
    }
    one("SET", "a", 1)
    for port, (library, reason) in enumerate(reasons.items(), 7045):
        another = Server("127.0.0.1", before=["--loadmodule", f"{FOLDER}/{library}.so"], tcp=port)
        assert another.says(text + reason)
        assert library != "takes-connect" or another.says("takes-connect.so")
        another.follow(one)
        another.up()
        same(one, another)
        assert another.info("rdma_engine_links_made") == 0 and one.info("rdma_engine_accepted") == 0


def versions():
    """A newer replica of an older server, which then takes its place: NEWEST has the newer server and its module."""
    program, module = os.environ["NEWEST"].split()
    older = Server("192.0.2.1")
    newer = Server("192.0.2.2", program=program, module=module)
    older("DEBUG", "POPULATE", 5000, "key", 1000)
    for load in "disabled", "swapdb":
        newer.config(repl_diskless_load=load)
        newer("REPLICAOF", "NO", "ONE")
        newer("FLUSHALL")
        newer.follow(older)
        newer.up()
        same(older, newer)
    full, made = older.info("sync_full"), newer.info("rdma_engine_links_made")
    assert full >= 2 and made >= 2
    cut(newer)
    older("SET", "after", "the cut")
    within(60, lambda: newer.info("rdma_engine_links_made") > made, "another link")
    newer.up()
    assert older("WAIT", 1, 60_000) == 1 and older.info("sync_full") == full and older.info("sync_partial_ok") >= 1
    same(older, newer)
    assert older("FAILOVER", "TO", newer.address, newer.port, "TIMEOUT", 60_000) == "OK"
    within(90, lambda: newer.info("role") == "master" and older.info("role") == "slave", "a failover")
    older.up()
    newer("SET", "after", "the failover")
    assert newer("WAIT", 1, 60_000) == 1 and newer.info("sync_full") == 0
    same(older, newer)
    assert older.info("rdma_engine_links") == 1
    what = [one.info("valkey_version") for one in (older, newer)]
    print(f"{what[0]} to {what[1]}: {full} full synchronizations, a cut, a failover, and back as a replica")


def leaks():
    """Hundreds of links, one after the other: what the replica holds does not grow."""
    primary, replica = pair()
    replica.follow(primary)
    replica.up()

    def held():
        return len(os.listdir(f"/proc/{replica.process.pid}/fd"))

    before, made = held(), replica.info("rdma_engine_links_made")
    for number in range(200):
        cut(replica)
        within(60, lambda: replica.info("rdma_engine_links_made") == made + number + 1, "another link")
        replica.up()
    within(60, lambda: held() <= before, f"{before} descriptors, and not {held()}")
    assert primary.info("sync_full") == 1


STEPS = [modes, cuts, roles, one_address, prefer, names, channels, waits, stopped, again, refused]
LONG = [cluster, sentinel, leaks]
# For two servers, which valkey/module/test names.
BY_NAME = [versions]

try:
    for step in STEPS + (LONG if SECONDS or NAMED else []) + (BY_NAME if NAMED else []):
        if NAMED and step.__name__ not in NAMED or step.__name__ in os.environ.get("WITHOUT", "").split():
            continue
        begun = time.monotonic()
        step()
        stop_all()
        print(f"{step.__name__}: {step.__doc__.splitlines()[0]} {time.monotonic() - begun:.1f} s", flush=True)
except BaseException:
    for one in Server.all:
        with open(one.log, errors="replace") as log:
            print(f"== {one.log}\n" + "".join(log.readlines()[-15:]), file=sys.stderr)
    raise
finally:
    stop_all()
