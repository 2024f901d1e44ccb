#!/usr/bin/env python3
"""Hostile primaries of a valkey-server with the module: as peers of RDMA, and as servers that speak the protocol of replication.

    hostile_primary.py SERVER MODULE SOFTRDMA FOLDER CONFORMANCE BRIDGE [STEP…]

`valkey/module/test hostile-primary` runs it. After each step the server must be up, serve its own clients, hold as much as before, and
follow an honest primary.
"""

import os
import random
import socket
import subprocess
import sys
import threading
import time

from servers import FOLDER, SOFTRDMA, Server, same, stop_all, within

CONFORMANCE, BRIDGE = sys.argv[5:7]
NAMED = sys.argv[7:]
HERE = os.path.dirname(os.path.realpath(__file__))
SUITE = "192.0.2.9"
WINDOW = 131072
SEED = int(os.environ.get("HOSTILE_SEED", time.time()))
LINKS = ("--loadmodule", f"{FOLDER}/links.so", "--rdma-rx-size", WINDOW)


def held(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd")), server.info("rdma_engine_registered_bytes"), server.info("rdma_engine_links")


def resident(server):
    """Kilobytes. 0 under ASan, which keeps what was freed."""
    with open(f"/proc/{server.process.pid}/maps") as maps:
        if "libasan" in maps.read():
            return 0
    with open(f"/proc/{server.process.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def at_rest(server):
    """What it holds once that stays as it is: a closed link delivers its last bytes for two seconds."""
    looks = []
    until = time.monotonic() + 60
    while len(looks) < 4 or len(set(looks[-4:])) > 1:
        assert time.monotonic() < until, looks[-4:]
        looks.append(held(server))
        time.sleep(1)
    return looks[-1]


class Judged:
    """A server whose primaries are hostile meanwhile."""

    def __init__(self, server):
        self.server = server
        # The first link makes what is kept, and all else is made and given back.
        self.follows_an_honest_one()
        self.before, self.resident = at_rest(server), resident(server)

    def follows_an_honest_one(self):
        honest = Server("192.0.2.8")
        honest("DEBUG", "POPULATE", 1000, "honest", 500)
        self.server.follow(honest)
        self.server.up()
        same(honest, self.server)
        self.server("REPLICAOF", "NO", "ONE")
        honest.kill()

    def passes(self):
        assert self.server.process.poll() is None
        assert self.server("SET", "own", "client") == "OK" and self.server("GET", "own") == "client"
        self.follows_an_honest_one()
        after, now = at_rest(self.server), resident(self.server)
        assert after == self.before, f"held: {self.before} before, {after} now"
        assert now <= self.resident * 1.25 + 16 * 1024, f"{self.resident} kB resident before, {now} now"
        print(f"held before and after: {self.before}; resident: {self.resident} and {now} kB", flush=True)


def suite(name, *options):
    """Runs the client profile, and returns its exit status."""
    command = [SOFTRDMA, "run", "--address", SUITE, "--", CONFORMANCE, "run", "client", "--listen", f"{SUITE}:7300", "--allow-disruptive"]
    return subprocess.run([*command, "--name", name, *options]).returncode


def links():
    """The suite's client profile, on connections that the server makes as it makes those to its primary."""
    # It is how long the server waits for a connection.
    judged = Judged(Server("192.0.2.2", "--repl-timeout", 10, *LINKS))
    client = f"{HERE}/link_client.py {judged.server.path} {{host}} {{port}} {WINDOW}"
    status = suite("links", "--exec", client, "--patience", os.environ.get("PATIENCE", "8"), "--strict")
    assert judged.server("LINK.CLOSE") == "OK"
    judged.passes()
    assert status == 0, status


def replica():
    """All cases of that profile as the primary of a replica, which comes again after each. Cases expect more of a client than it does, so
    they judge little; the server is judged."""
    judged = Judged(Server("192.0.2.2", "--repl-timeout", 3, *LINKS))
    made = judged.server.info("rdma_engine_links_made")
    assert judged.server("REPLICAOF", SUITE, 7300) == "OK"
    # The target is not of this machine's address: the option twice means that it is to be.
    status = suite("replica", "--wait", "--patience", "2", "--allow-disruptive")
    assert status in (0, 1, 2), status
    judged.server("REPLICAOF", "NO", "ONE")
    made = judged.server.info("rdma_engine_links_made") - made
    print(f"the replica made {made} links")
    assert made > 50
    judged.passes()


# ---- primaries that speak the protocol of replication


class Fake:
    """A primary over TCP. The bridge makes it one over RDMA, too."""

    def __init__(self, name, play):
        self.name, self.play, self.came = name, play, []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                peer = self.socket.accept()[0]
            except OSError:
                return
            self.came.append(time.monotonic())
            if len(self.came) > 1:
                peer.close()
                continue
            try:
                self.play(Peer(peer))
            except OSError:
                pass
            finally:
                peer.close()

    def stop(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Peer:
    def __init__(self, sock):
        self.socket, self.file = sock, sock.makefile("rb")
        self.socket.settimeout(120)

    def command(self):
        count = self.file.readline()
        if not count.startswith(b"*"):
            raise OSError("the replica has left")
        words = []
        for _ in range(int(count[1:])):
            words.append(self.file.read(int(self.file.readline()[1:]) + 2)[:-2])
        return words

    def send(self, data):
        self.socket.sendall(data)

    def until_it_leaves(self):
        while self.file.read1(65536):
            pass


STAGES = "connected", "ping", "replconf", "psync", "size", "rdb", "stream"
MARK = b"m" * 40


def up_to(peer, stage, rdb, diskless):
    """Is an honest primary as far as that."""
    if stage == "connected":
        return
    for name in "ping", "replconf", "psync":
        while (words := peer.command())[0].lower() != name.encode():
            peer.send(b"+OK\r\n")
        if stage == name:
            return
        peer.send({"ping": b"+PONG\r\n", "replconf": b"+OK\r\n", "psync": b"+FULLRESYNC " + b"a" * 40 + b" 1\r\n"}[name])
    assert words[0] == b"PSYNC"
    if stage == "size":
        return
    peer.send(b"$EOF:" + MARK + b"\r\n" if diskless else b"$%d\r\n" % len(rdb))
    peer.send(rdb[: len(rdb) // 2])
    if stage == "rdb":
        return
    peer.send(rdb[len(rdb) // 2 :] + (MARK if diskless else b""))
    peer.send(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n" * 100)


ACTIONS = {
    "says nothing": b"",
    "leaves": None,
    "begins a line that never ends": b"+" + b"x" * 100_000,
    "sends what is no RESP": bytes(range(14, 256)) * 20 + b"\r\n",
}
# At a stage, what is said instead of what is due.
WORDS = [
    ("ping", "-NOAUTH no\r\n"),
    ("ping", "-ERR busy\r\n"),
    ("replconf", ":1\r\n"),
    ("psync", "-LOADING wait\r\n"),
    ("psync", "-NOMASTERLINK none\r\n"),
    ("psync", "+FULLRESYNC short\r\n"),
    ("psync", "+DUALCHANNELSYNC\r\n"),
    ("psync", "\n" * 50),
    ("size", "$-7\r\n"),
    ("size", "$-7\r\n" + "x" * 200_000),
    ("size", "$9223372036854775807\r\nREDIS"),
    ("size", "$99999999999999999999999\r\nREDIS"),
    ("size", "$many\r\n"),
    ("size", "$EOF:short\r\n"),
    ("size", "-ERR no\r\n"),
    ("stream", "*1000000000\r\n"),
    ("stream", "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$500000000\r\nx"),
    ("stream", "*1\r\n$-1\r\n"),
    ("stream", "*2\r\n$8\r\nREPLCONF\r\n$1\r\n"),
]


def scripts(rdb):
    """Names, whether the load is diskless, and what the primary does."""

    def script(stage, diskless, data, leaves):
        def play(peer):
            up_to(peer, stage, rdb, diskless)
            if data:
                peer.send(data)
            if not leaves:
                peer.until_it_leaves()

        return play

    for stage in STAGES:
        for diskless in (False, True) if STAGES.index(stage) > 3 else (False,):
            for what, data in ACTIONS.items():
                # Half an RDB that goes on with anything is one that is damaged.
                if stage == "rdb" and data:
                    continue
                yield f"{what}, at {stage}{', diskless' * diskless}", diskless, script(stage, diskless, data, data is None)
    for stage, words in WORDS:
        yield f"{words[:40]!r} at {stage}", False, script(stage, False, words.encode(), False)
    yield "newlines for a second, in place of the size", False, newlines(rdb)
    chance = random.Random(SEED)
    for number in range(20):
        yield f"seed {SEED}, {number}", bool(number % 2), damaged(rdb, chance, bool(number % 2))


def newlines(rdb):
    def play(peer):
        up_to(peer, "size", rdb, False)
        for _ in range(20):
            peer.send(b"\n")
            time.sleep(0.05)
        peer.until_it_leaves()

    return play


def damaged(rdb, chance, diskless):
    """What an honest primary says, up to any byte, or with any byte of what is no RDB changed."""
    replies = [b"+PONG\r\n", b"+OK\r\n", b"+OK\r\n", b"+OK\r\n", b"+FULLRESYNC " + b"a" * 40 + b" 1\r\n"]
    body = (b"$EOF:" + MARK + b"\r\n" + rdb + MARK) if diskless else b"$%d\r\n" % len(rdb) + rdb
    stream = bytearray(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n" * 20)
    if chance.random() < 0.5:
        one = chance.randrange(len(replies) + 1)
        damage = bytearray(replies[one]) if one < len(replies) else stream
        damage[chance.randrange(len(damage))] = chance.randrange(256)
        if one < len(replies):
            replies[one] = bytes(damage)
        left = None
    else:
        left = chance.randrange(sum(map(len, replies)) + len(body) + len(stream))
    leaves = chance.random() < 0.5

    def play(peer):
        nonlocal left
        for number, data in enumerate((*replies, body + bytes(stream))):
            if number < len(replies):
                peer.command()
            if left is not None:
                data, left = data[:left], left - len(data[:left])
            peer.send(data)
            if left == 0:
                break
        if not leaves:
            peer.until_it_leaves()

    return play


def protocol():
    """Primaries that say nothing, leave, or say what is wrong, at each stage of a synchronization: beside the same over TCP."""
    honest = Server("192.0.2.7")
    honest("DEBUG", "POPULATE", 2000, "key", 500)
    assert honest("SAVE") == "OK"
    with open(f"{honest.folder}/dump.rdb", "rb") as dump:
        rdb = dump.read()
    honest.kill()
    judged = Judged(Server("192.0.2.2", "--repl-timeout", 3, *LINKS))
    over_tcp = Server("192.0.2.3", "--repl-timeout", 3, replication="no")
    worst, warnings = 0, open(f"{FOLDER}/bridge", "w")
    # The fabric may not have heard yet that the bridge before has ended, so each has a port of its own.
    for port, (name, diskless, play) in enumerate(scripts(rdb), 6379):
        fakes = [Fake("RDMA", play), Fake("TCP", play)]
        bridge = subprocess.Popen([SOFTRDMA, "run", "--address", SUITE, "--", BRIDGE, "--quiet", "0", "--listen", f"rdma://{SUITE}:{port}",
                                   "--connect", f"tcp://127.0.0.1:{fakes[0].port}"], stdout=subprocess.PIPE, stderr=warnings, text=True)
        try:
            assert bridge.stdout.readline().startswith("listening")
            for server in judged.server, over_tcp:
                server.config(repl_diskless_load="swapdb" if diskless else "disabled")
            judged.server("REPLICAOF", SUITE, port)
            over_tcp("REPLICAOF", "127.0.0.1", fakes[1].port)
            for server, fake in zip((judged.server, over_tcp), fakes):
                within(120, lambda: server.process.poll() is None and len(fake.came) > 1, f"{name}: another attempt over {fake.name}")
                assert server("PING") == "PONG"
            seconds = [fake.came[1] - fake.came[0] for fake in fakes]
            worst = max(worst, seconds[0])
            print(f"{name}: comes again after {seconds[0]:.1f} s; over TCP, {seconds[1]:.1f} s", flush=True)
            for server in judged.server, over_tcp:
                assert server("REPLICAOF", "NO", "ONE") == "OK" and server("SET", "own", name) == "OK" and server("GET", "own") == name
        finally:
            bridge.kill()
            bridge.wait()
            for fake in fakes:
                fake.stop()
    print(f"at most {worst:.1f} s")
    judged.passes()


try:
    for step in (links, replica, protocol):
        if NAMED and step.__name__ not in NAMED:
            continue
        begun = time.monotonic()
        step()
        stop_all()
        print(f"{step.__name__}: {' '.join(step.__doc__.split())} {time.monotonic() - begun:.1f} s", flush=True)
except BaseException:
    print(f"HOSTILE_SEED={SEED}", file=sys.stderr)
    for one in Server.all:
        with open(one.log, errors="replace") as log:
            print(f"== {one.log}\n" + "".join(log.readlines()[-20:]), file=sys.stderr)
    raise
finally:
    stop_all()
