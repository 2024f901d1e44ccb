"""Real Valkeys, alone or as a cluster, over RDMA and TCP at the address of a device.

python servers.py NODES COMMAND [ARGUMENT…]    runs a command while they run, with VALKEY_TEST_URL: of one node alone, or of a cluster
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import redis

# Far longer than anything here takes, on a machine that is busy, too.
LONG = 120


def missing():
    """Returns why no Valkey can run here; None if one can."""
    if not os.environ.get("VALKEY_BIN") or not os.environ.get("LAB_IP4"):
        return "VALKEY_BIN and LAB_IP4 name no Valkey and no device; lab/run soft sets both"
    return None


def until(what):
    """Waits until a function returns what is true."""
    deadline = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < deadline, f"not so within {LONG} s: {what}"
        time.sleep(0.05)


class Servers:
    """Servers, each on one port for RDMA and TCP."""

    def __init__(self, count, first, rdma=True, options=()):
        self.host = os.environ["LAB_IP4"]
        self.ports = [first + number for number in range(count)]
        self.clustered = count > 1
        self._rdma = rdma
        self._options = options
        self._folder = tempfile.TemporaryDirectory()
        self._processes = {}
        try:
            for number in range(count):
                self.start(number)
            if self.clustered:
                self._join()
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self):
        return ",".join(f"{self.host}:{port}" for port in self.ports)

    @property
    def url(self):
        return f"rdma+cluster://{self.hosts}" if self.clustered else f"rdma://{self.hosts}"

    def node(self, number):
        """A client of redis-py for one server."""
        return redis.Redis(self.host, self.ports[number], socket_timeout=LONG)

    def start(self, number):
        folder = pathlib.Path(self._folder.name, str(number))
        folder.mkdir(exist_ok=True)
        port = str(self.ports[number])
        command = [pathlib.Path(os.environ["VALKEY_BIN"], "valkey-server"), "--dir", folder, "--save", ""]
        command += ["--protected-mode", "no", "--bind", self.host, "--port", port]
        if self._rdma:
            command += ["--rdma-bind", self.host, "--rdma-port", port]
        if self.clustered:
            # Nothing is decided by how long a busy machine stands still.
            command += ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
            command += ["--cluster-node-timeout", "60000"]
        command += self._options
        with open(folder / "log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._processes[number] = process

        def answers():
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(redis.ConnectionError), self.node(number) as node:
                return node.ping()

        until(answers)

    def stop(self, number):
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def _join(self):
        nodes = [self.node(number) for number in range(len(self.ports))]
        for number, node in enumerate(nodes):
            # Epochs that differ, so that the nodes never choose new ones.
            node.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        cuts = [16384 * number // len(nodes) for number in range(len(nodes) + 1)]
        for number, node in enumerate(nodes):
            node.execute_command("CLUSTER ADDSLOTSRANGE", cuts[number], cuts[number + 1] - 1)
            nodes[0].execute_command("CLUSTER MEET", self.host, self.ports[number])
        # A node that knows of all slots refuses writes for its first two seconds, with "The cluster is down".
        for node in nodes:
            until(lambda node=node: self._serves(node))
            node.close()

    def settled(self, slot, owner):
        """Waits until every node knows that a slot is one node's, and the epoch that outdates older messages."""
        epoch = self.node(owner).execute_command("CLUSTER INFO")["cluster_my_epoch"]

        def known():
            for number in range(len(self.ports)):
                told = self.node(number).execute_command("CLUSTER NODES")[f"{self.host}:{self.ports[owner]}"]
                slots = [[int(end) for end in part] for part in told["slots"]]
                if told["epoch"] != epoch or not any(part[0] <= slot <= part[-1] for part in slots):
                    return False
            return True

        until(known)

    @staticmethod
    def _serves(node):
        told = node.execute_command("CLUSTER INFO")
        return told["cluster_state"] == "ok" and told["cluster_slots_ok"] == "16384"

    def close(self):
        for number in list(self._processes):
            self.stop(number)
        self._folder.cleanup()


def main():
    with contextlib.closing(Servers(int(sys.argv[1]), 7101)) as servers:
        environment = os.environ | {"VALKEY_TEST_URL": servers.url}
        sys.exit(subprocess.run(sys.argv[2:], env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
