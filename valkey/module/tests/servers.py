"""Servers with the module, for the programs of this folder: on softrdma, or, if that has no path, on the machine's own device."""

import os
import signal
import subprocess
import sys
import tempfile
import time

from resp import Client

SERVER, MODULE, SOFTRDMA, FOLDER = sys.argv[1:5]
# Another program may have had servers in the same folder.
PLACE = tempfile.mkdtemp(prefix="servers-", dir=FOLDER)
MIB = 1 << 20


class Server:
    count = 0
    all = []

    def __init__(self, address, *options, replication="yes", program=SERVER, port=6379, tcp=0, before=(), module=MODULE):
        Server.count += 1
        # A machine may have several addresses.
        self.address, self.port = address.split(",")[0], tcp or port
        self.folder = f"{PLACE}/server-{Server.count}"
        os.makedirs(self.folder)
        # A path to a Unix socket has 107 bytes.
        self.path = f"{PLACE}/{Server.count}.s"
        words = [*before, "--loadmodule", module, *(["replication", replication] if replication else []), "--rdma-bind", *address.split(",")]
        words += ["--rdma-port", str(self.port), "--port", str(tcp), "--unixsocket", self.path]
        words += ["--save", "", "--dir", self.folder, "--protected-mode", "no", "--enable-debug-command", "yes", "--rdbcompression", "no"]
        words += ["--repl-diskless-sync-delay", "0", "--repl-backlog-size", "64mb", "--replica-announce-port", str(self.port)]
        self.command = [*([SOFTRDMA, "run", "--address", address, "--"] if SOFTRDMA else []), program, *words, *map(str, options)]
        self.start()

    def start(self):
        self.log = f"{self.folder}/log"
        within(60, self.begins, f"{self.log}: an address that is free")
        self.client = Client(self.path)

    def begins(self):
        """Whether it has begun. The fabric may not have heard so far that the last program at this address is gone."""
        with open(self.log, "ab") as log:
            before = log.tell()
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        Server.all.append(self)

        # What an earlier process of it said does not count.
        def said():
            with open(self.log, errors="replace") as log:
                log.seek(before)
                return log.read()

        within(60, lambda: self.process.poll() is not None or "Ready to accept" in said(), f"{self.log}: a start")
        if self.process.poll() is None:
            return True
        Server.all.remove(self)
        assert "the fabric refuses this program: Address already in use" in said(), f"{self.log}: it has ended"
        return False

    def __call__(self, *words):
        self.client.send(*words)
        return self.client.reply()

    def info(self, field):
        for line in self("INFO", "everything").splitlines():
            if line.startswith(field + ":"):
                value = line.split(":", 1)[1]
                return int(value) if value.lstrip("-").isdigit() else value
        return None

    def says(self, text):
        with open(self.log, errors="replace") as log:
            return text in log.read()

    def config(self, **settings):
        for name, value in settings.items():
            assert self("CONFIG", "SET", name.replace("_", "-"), value) == "OK"

    def follow(self, primary):
        assert self("REPLICAOF", primary.address, primary.port) == "OK"

    def up(self, seconds=60):
        within(seconds, lambda: self.info("master_link_status") == "up", f"{self.log}: a link to the primary")

    def kill(self, how=signal.SIGKILL):
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(how)
        self.process.wait()
        Server.all.remove(self)
        if os.path.exists(self.path):
            os.unlink(self.path)


def within(seconds, happens, what):
    """Waits until it happens. The time is for machines that stand still: nothing takes so long."""
    until = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def same(*servers):
    """All have the same data, once their streams are read."""
    within(90, lambda: len({one("DEBUG", "DIGEST") for one in servers}) == 1, "equal digests of " + ", ".join(one.log for one in servers))
    assert servers[0]("DBSIZE") > 0


def fault(server, what):
    subprocess.run([SOFTRDMA, "fault", "--address", server.address, what], check=True, stdout=subprocess.DEVNULL)


def attempt(server, *words):
    try:
        return server(*words)
    except RuntimeError as error:
        return str(error)


def cut(replica):
    """While a replica synchronizes, it has no client that could be killed."""
    within(60, lambda: replica("CLIENT", "KILL", "TYPE", "primary") == 1, "a connection to kill")


def stop_all():
    for one in list(Server.all):
        one.kill()
