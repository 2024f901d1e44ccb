"""Many connections of one program: python3 programs.py bench|benchmark|bridge PROGRAM HOST PORT COUNT THREADS

rdma-bench and valkey-benchmark have COUNT clients on THREADS threads, which send some requests. The bridge has COUNT clients over TCP, from THREADS
threads here, and a connection over RDMA for each. Prints descriptors and time for each, or the text of the error that ends them; the exit status is
then 3.
"""

import concurrent.futures
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

# Seconds. A busy machine is not a limit.
PATIENCE = 120
LONGEST = 600

kind, program, host, port = sys.argv[1:5]
count, threads = map(int, sys.argv[5:7])


class Limited(Exception):
    pass


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def runs(command, requests):
    """Runs a benchmark. Its time is that from its start to its end."""
    begun, most = time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            while process.poll() is None:
                try:
                    most = max(most, descriptors(process))
                except FileNotFoundError:
                    pass
                if time.monotonic() > begun + LONGEST:
                    raise Limited(f"has not ended within {LONGEST} s")
                time.sleep(0.01)
        finally:
            process.kill()
        if process.returncode:
            said.seek(0)
            # Without rdma-bench's progress.
            raise Limited(" ".join(re.sub(r"\w+: [0-9]+ of [0-9]+ requests", "", said.read()).split())[-1000:])
    # A program without connections has some ten, which count here.
    each = (time.monotonic() - begun) * 1000 / count
    print(f"{most / count:.2f} descriptors and {each:.2f} ms each, with {requests} requests", flush=True)


def bench():
    requests = max(20 * count, 2000)
    runs([program, "--target", f"rdma://{host}:{port}", "-t", "ping", "-c", str(count), "-n", str(requests),
          "--threads", str(min(threads, count)), "--timeout", str(PATIENCE)], requests)


def benchmark():
    requests = max(20 * count, 2000)
    several = ["--threads", str(min(threads, count))] if threads > 1 else []
    runs([program, "--rdma", "-h", host, "-p", port, "-t", "set", "-c", str(count), "-n", str(requests), "-q", *several], requests)


def ping(client):
    client.sendall(b"PING\r\n")
    reply = b""
    while not reply.endswith(b"\r\n"):
        some = client.recv(1000)
        if not some:
            raise Limited("the bridge has closed a connection")
        reply += some
    if reply != b"+PONG\r\n":
        raise Limited(reply.decode(errors="replace").strip())


def relays(process, address, made):
    def clients(share):
        all_of_them = []
        for _ in range(share):
            all_of_them.append(socket.create_connection(address, timeout=PATIENCE))
            # The bridge connects for it before it relays anything.
            ping(all_of_them[-1])
            next(made)
        return all_of_them

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        # The first one opens what a process has once.
        several = clients(1)
        before, begun = descriptors(process), time.monotonic()
        shares = [(thread + 1) * count // threads - thread * count // threads for thread in range(threads)]
        for some in pool.map(clients, shares):
            several += some
        # One is for the client, whose connection is TCP's.
        each = (time.monotonic() - begun) * 1000 / count, (descriptors(process) - before) / count - 1
    for client in several:
        ping(client)
    print(f"{each[1]:.2f} descriptors and {each[0]:.2f} ms each, beside one for TCP", flush=True)


def bridge():
    made = itertools.count(-1)
    command = [program, "--listen", "tcp://127.0.0.1:0", "--connect", f"rdma://{host}:{port}", "--connect-timeout", str(PATIENCE),
               "--max-connections", str(count + 1)]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
        try:
            found = re.match(r"listening on tcp://([0-9.]+):([0-9]+)", process.stdout.readline())
            if not found:
                raise Limited("the bridge does not listen")
            relays(process, (found[1], int(found[2])), made)
        except (Limited, OSError) as error:
            said.seek(0)
            raise Limited(f"after {max(next(made), 0)}: {error}: {' '.join(said.read().split())[-1000:]}") from None
        finally:
            process.kill()


try:
    {"bench": bench, "benchmark": benchmark, "bridge": bridge}[kind]()
except (Limited, OSError) as error:
    print(error, flush=True)
    sys.exit(3)
