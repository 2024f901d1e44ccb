"""Which TCP connections this process has: what went over RDMA made none."""

import contextlib
import os
import pathlib

ESTABLISHED = "01"


def tcp_ports():
    """The ports that this process has TCP connections to, each as often as it has one."""
    inodes = set()
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(descriptor)
            if name.startswith("socket:["):
                inodes.add(name[len("socket:[") : -1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == ESTABLISHED and fields[9] in inodes:
                ports.append(int(fields[2].rsplit(":", 1)[1], 16))
    return sorted(ports)


def over_tcp(servers):
    """How many TCP connections this process has to these servers."""
    return sum(port in servers.ports for port in tcp_ports())
