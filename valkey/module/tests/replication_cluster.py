"""Steps of replication.py in which others than the user say who is a replica of whom."""

import os
import random
import subprocess
import threading

from resp import Client
from servers import FOLDER, SERVER, Server, attempt, same, within

# A node that stands still for less than PATIENT is not given up; a dead one is, after IMPATIENT.
PATIENT, IMPATIENT = 60_000, 5000


def cluster():
    """Replicas, slots that move under writes, and failovers. The bus stays TCP."""
    nodes = []
    for number in range(1, 6):
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", PATIENT, "--cluster-manual-failover-timeout", PATIENT]
        nodes.append(Server("127.0.0.1", *options, tcp=7050 + number))
    # The last one is there for a majority.
    first, second, third, fourth, voter = nodes
    for one in nodes[1:]:
        assert first("CLUSTER", "MEET", one.address, one.port) == "OK"
    first("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
    second("CLUSTER", "ADDSLOTSRANGE", 8192, 16000)
    voter("CLUSTER", "ADDSLOTSRANGE", 16001, 16383)
    within(60, lambda: all(one.info("cluster_enabled") == 1 and "cluster_known_nodes:5" in one("CLUSTER", "INFO") and
                           "cluster_state:ok" in one("CLUSTER", "INFO") for one in nodes), "a cluster")
    for replica, primary in (third, first), (fourth, second):
        within(60, lambda: attempt(replica, "CLUSTER", "REPLICATE", primary("CLUSTER", "MYID")) == "OK", "a replica")
    for one in third, fourth:
        one.up()
        assert one.info("rdma_engine_links") == 1
    clients = [Client(one.path) for one in (first, second, voter)]
    written, stopped = {}, threading.Event()

    def routed(*words):
        """By the primary that has the key's slot."""
        while True:
            for one in clients:
                one.send(*words)
                try:
                    return one.reply()
                except RuntimeError as error:
                    assert str(error).split()[0] in ("MOVED", "TRYAGAIN", "CLUSTERDOWN"), error

    def write():
        while not stopped.is_set() or len(written) < 3000:
            key, value = f"key:{random.randrange(10_000)}", os.urandom(200).hex()
            assert routed("SET", key, value) == "OK"
            written[key] = value

    writer = threading.Thread(target=write)
    writer.start()
    within(60, lambda: len(written) > 1000, "writes")
    accepted = second.info("rdma_engine_accepted")
    made = first.info("rdma_engine_links_made")
    assert first("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", 0, 4095, "NODE", second("CLUSTER", "MYID")) == "OK"
    within(120, lambda: "success" in str(first("CLUSTER", "GETSLOTMIGRATIONS")), "slots that have moved")
    stopped.set()
    writer.join()
    # A replica may have come again meanwhile. A primary makes a link for slots only.
    assert second.info("rdma_engine_accepted") > accepted and first.info("rdma_engine_links_made") == made + 1
    same(first, third)
    same(second, fourth)
    assert all(routed("GET", key) == value for key, value in written.items())
    assert sum(one("DBSIZE") for one in (first, second, voter)) == len(written)
    assert fourth("CLUSTER", "FAILOVER") == "OK"
    within(90, lambda: fourth.info("role") == "master" and second.info("role") == "slave", "a failover")
    second.up()
    # Only the first one's replica may be promoted, whichever node stands still.
    second.config(cluster_replica_no_failover="yes")
    first.kill()
    for one in second, third, fourth, voter:
        one.config(cluster_node_timeout=IMPATIENT)
    within(180, lambda: third.info("role") == "master", "a failover by itself")
    for one in second, third, fourth, voter:
        one.config(cluster_node_timeout=PATIENT)
    first.start()
    within(180, lambda: first.info("role") == "slave", "a primary that is back as a replica")
    first.up()
    same(first, third)
    same(second, fourth)
    assert first.info("rdma_engine_links") == 1 and second.info("rdma_engine_links") == 1


def sentinel():
    """Sentinel, over TCP, promotes a replica whose link is RDMA, and has the old primary follow it."""
    primary, replica = Server("127.0.0.1", tcp=7071), Server("127.0.0.1", tcp=7072)
    replica.follow(primary)
    replica.up()
    folder = f"{FOLDER}/sentinel"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/conf", "w") as conf:
        conf.write(f"port 7073\nunixsocket {folder}/s\ndir {folder}\nsentinel monitor it 127.0.0.1 7071 1\n"
                   f"sentinel down-after-milliseconds it {PATIENT}\nsentinel failover-timeout it 20000\n")
    watcher = subprocess.Popen([SERVER, f"{folder}/conf", "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        client = None

        def listens():
            nonlocal client
            try:
                client = Client(f"{folder}/s")
            except OSError:
                return False
            return True

        within(60, listens, "a sentinel")

        def ask(*words):
            client.send("SENTINEL", *words)
            return client.reply()

        within(60, lambda: "7072" in str(ask("REPLICAS", "it")), "a sentinel that knows the replica")
        primary("SET", "a", 1)
        same(primary, replica)
        primary.kill()
        assert ask("SET", "it", "down-after-milliseconds", IMPATIENT) == "OK"

        def promoted():
            try:
                return replica.info("role") == "master"
            except OSError:
                # Sentinel ends the connections of all clients.
                replica.client = Client(replica.path)
                return False

        within(240, promoted, "a replica that is promoted")
        assert ask("SET", "it", "down-after-milliseconds", PATIENT) == "OK"
        primary.start()

        def of_old():
            try:
                return [primary.info("role"), primary.info("master_link_status")]
            except OSError:
                primary.client = Client(primary.path)
                return None

        within(240, lambda: of_old() == ["slave", "up"], "the old primary as a replica")
        same(primary, replica)
        assert primary.info("rdma_engine_links") == 1
    finally:
        watcher.kill()
        watcher.wait()
