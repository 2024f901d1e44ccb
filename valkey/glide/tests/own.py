"""Runs GLIDE's own Python tests over each transport, and compares the outcomes by name: valkey/glide/own calls it."""

import collections
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

import servers

# Tests sleep in the server.
OPTIONS = ("--enable-debug-command", "yes")

# What pytest's report names the outcomes that are none of success.
WORSE = ("failure", "error", "skipped")


def outcomes(folder, transport, arguments):
    """The outcome of each test, by its name."""
    with (
        contextlib.closing(servers.Servers(1, 7341, options=OPTIONS)) as alone,
        contextlib.closing(servers.Servers(3, 7351, options=OPTIONS)) as cluster,
        tempfile.NamedTemporaryFile(suffix=".xml") as report,
    ):
        command = [sys.executable, "-m", "pytest", "-p", "over", "-p", "no:cacheprovider", "-q", "--tb=line", f"--junitxml={report.name}"]
        command += [f"--standalone-endpoints={alone.hosts}", f"--cluster-endpoints={cluster.hosts}", *arguments]
        subprocess.run(command, cwd=folder, env=os.environ | {"GLIDE_TRANSPORT": transport}, check=False)
        found = {}
        for case in ElementTree.parse(report.name).iter("testcase"):
            worse = [child.tag for child in case if child.tag in WORSE]
            found[f"{case.get('classname')}::{case.get('name')}"] = worse[0] if worse else "passed"
        return found


def main():
    folder, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
    tcp, rdma = (outcomes(folder, transport, arguments) for transport in ("TCP", "RDMA"))
    for name, found in (("TCP", tcp), ("RDMA", rdma)):
        print(f"{name}: {dict(collections.Counter(found.values()))}")
    differing = [name for name in sorted(tcp | rdma) if tcp.get(name) != rdma.get(name)]
    for name in differing:
        print(f"over TCP {tcp.get(name, 'not run')}, over RDMA {rdma.get(name, 'not run')}: {name}")
    sys.exit(bool(differing) or not tcp)


main()
