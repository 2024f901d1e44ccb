"""Many connections of one program: python3 programs.py bench|bridge PROGRAM HOST PORT COUNT THREADS

The benchmark has COUNT clients on THREADS threads. The bridge has COUNT clients over TCP, from as many threads here, and a connection over RDMA
for each. Prints descriptors and time for each, or the text of the error that ends them; the exit status is then 3.
"""

import concurrent.futures
import os
import re
import socket
import subprocess
import sys
import time

# Seconds. A busy machine is not a limit.
PATIENCE = 120

kind, program, host, port = sys.argv[1:5]
count, threads = map(int, sys.argv[5:7])


class Limited(Exception):
    pass


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def tells(each, begun):
    print(f"{each:.2f} descriptors and {(time.monotonic() - begun) * 1000 / count:.2f} ms each", flush=True)


def bench():
    command = [program, "--target", f"rdma://{host}:{port}", "-t", "ping", "-c", str(count), "-n", str(20 * count),
               "--threads", str(min(threads, count)), "--timeout", str(PATIENCE)]
    begun, most = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            try:
                most = max(most, descriptors(process))
            except FileNotFoundError:
                pass
            time.sleep(0.01)
        if process.returncode:
            raise Limited(process.stderr.read().strip())
    # Those of a program without connections are some ten, and count here.
    tells(most / count, begun)


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


def relay(process, address):
    def clients(share):
        all_of_them = []
        for _ in range(share):
            all_of_them.append(socket.create_connection(address, timeout=PATIENCE))
            # The bridge connects for it, before it relays anything.
            ping(all_of_them[-1])
        return all_of_them

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        first = clients(1)
        before, begun = descriptors(process), time.monotonic()
        shares = [(thread + 1) * count // threads - thread * count // threads for thread in range(threads)]
        made = list(pool.map(clients, shares))
        # One for the client, whose connection is TCP's.
        each = (descriptors(process) - before) / count - 1
        tells(each, begun)
        for client in [one for some in made for one in some] + first:
            ping(client)


def bridge():
    command = [program, "--listen", "tcp://127.0.0.1:0", "--connect", f"rdma://{host}:{port}", "--connect-timeout", str(PATIENCE),
               "--max-connections", str(count + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if found := re.search(r"listening on tcp://([0-9.]+):([0-9]+)", line):
                    relay(process, (found[1], int(found[2])))
                    return
            raise Limited("".join(said))
        except Limited as error:
            process.kill()
            raise Limited(f"{error}: {''.join(said)}{process.stdout.read()}".replace("\n", " ")) from None
        finally:
            process.kill()


try:
    {"bench": bench, "bridge": bridge}[kind]()
except (Limited, OSError) as error:
    print(error, flush=True)
    sys.exit(3)
