"""Counts what SET and GET of large values cost in Python, beside redis-py, GLIDE and LMCache's own connector.

Each client has a process of its own. Counted are, for each byte of the value: user instructions by callgrind, without those of
softrdma's device; and bytes that were copied or cleared in user space, in blocks of a KiB and more. The kernel's copies over TCP are not
counted. `lab/run soft apps/python/cost` prints the table, of the server that VALKEY_TEST_URL names.

    cost.py              the table
    cost.py CLIENT       does the work of one client, as the table has it done
"""

import argparse
import ctypes
import importlib.machinery
import importlib.util
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
SIZES = (1, 16, 64)
TURNS = 2
TORCH = "void _ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE15_M_replace_coldEPcmPKcmm(void) { __builtin_trap(); }"


class Ours:
    """This package, over RDMA or TCP."""

    def __init__(self, url, registered=False, new=False):
        import valkey_rdma

        self._client = valkey_rdma.Client(url, timeout=600, connect_timeout=600)
        self._registered, self._new = registered, new

    def begin(self, arena):
        self._arena = arena
        if self._registered:
            self._client.register(arena)

    def set(self, view):
        self._client.set_from("key", view)

    def get(self, view):
        return self._client.get("key") if self._new else self._client.get_into("key", view)

    def windows(self):
        """Return the bytes that were copied out of windows, or into send buffers: by assembly, which no preloaded function sees."""
        return self._client.counts.bytes_copied if self._client.transport == "rdma" else 0

    def end(self):
        if self._registered:
            self._client.unregister(self._arena)


class RedisPy:
    """redis-py: SET of a memoryview, GET as new bytes."""

    def __init__(self, host, port):
        import redis

        self._client = redis.Redis(host, port)

    def begin(self, arena):
        pass

    def set(self, view):
        self._client.set("key", view)

    def get(self, _view):
        return self._client.get("key")

    def windows(self):
        return 0

    def end(self):
        pass


class Glide(RedisPy):
    """GLIDE's synchronous client: SET of a memoryview, and GET into one."""

    def __init__(self, host, port):
        from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

        addresses = [NodeAddress(host, port)]
        self._client = GlideClient.create(GlideClientConfiguration(addresses, request_timeout=600_000))

    def get(self, view):
        return self._client.get("key", buffer=view)


class LMCache(RedisPy):
    """The native connector of LMCache's RESP adapter, without the package around it.

    It is linked with libraries of torch, of which it uses no function. They have a part of a newer libstdc++, for strings that overlap,
    which it never calls. So :data:`TORCH` takes their place, and a call would end the process.
    """

    def __init__(self, host, port):
        (package,) = importlib.util.find_spec("lmcache").submodule_search_locations
        path = next(pathlib.Path(package).glob("lmcache_redis.*.so"))
        loader = importlib.machinery.ExtensionFileLoader("lmcache_redis", str(path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lmcache_redis", loader))
        loader.exec_module(module)
        self._client = module.LMCacheRedisClient(host, port, 1, "", "")

    def _ended(self, future):
        poll = select.poll()
        poll.register(self._client.event_fd(), select.POLLIN)
        poll.poll()
        os.eventfd_read(self._client.event_fd())
        ((number, ok, error, *_),) = self._client.drain_completions()
        assert (number, ok) == (future, True), error

    def set(self, view):
        self._ended(self._client.submit_batch_set(["key"], [view]))

    def get(self, view):
        self._ended(self._client.submit_batch_get(["key"], [view]))


def clients(url):
    """Return what makes each client, by its name."""
    place = url.partition("://")[2]
    host, port = place.split(":")
    rdma, tcp = f"rdma://{place}", f"tcp://{place}"
    return {
        "TCP: set_from, get_into": lambda: Ours(tcp),
        "TCP: set, get": lambda: Ours(tcp, new=True),
        "TCP: redis-py": lambda: RedisPy(host, int(port)),
        "TCP: GLIDE": lambda: Glide(host, int(port)),
        "TCP: LMCache's connector": lambda: LMCache(host, int(port)),
        "RDMA: registered": lambda: Ours(rdma, registered=True),
        "RDMA: buffer as it is": lambda: Ours(rdma),
        "RDMA: set, get": lambda: Ours(rdma, new=True),
    }


def work(url, name):
    """Do each operation once, and then as often as is counted."""
    library = ctypes.CDLL(os.environ["COST_LIBRARY"])
    for count in (library.cost_copied, library.cost_cleared):
        count.restype = ctypes.c_ulonglong
    begin, end = library.cost_begin, library.cost_end
    client = clients(url)[name]()
    for mib in SIZES:
        arena = bytearray(os.urandom(MIB) * mib)
        view = memoryview(arena)
        client.begin(arena)
        for act in (client.set, client.get):
            act(view)
            before = library.cost_copied() + client.windows(), library.cost_cleared()
            began = time.perf_counter()
            begin()
            for _turn in range(TURNS):
                act(view)
            end()
            ended = time.perf_counter()
            after = library.cost_copied() + client.windows(), library.cost_cleared()
            copied, cleared = (new - old for new, old in zip(after, before, strict=True))
            size = TURNS * mib * MIB
            print(act.__name__, mib, copied / size, cleared / size, (ended - began) / TURNS * 1e3, flush=True)
        view.release()
        client.end()


def instructions(folder):
    """Return the counted instructions of each operation, in order, without those of softrdma."""
    counts = []
    for number in range(1, 2 * len(SIZES) + 1):
        path = folder / f"out.{number}"
        names, device, total, call = {}, False, 0, False
        for line in path.read_text().splitlines():
            if line.startswith("ob="):
                key, _, name = line[3:].partition(" ")
                name = names.setdefault(key, name)
                device = "softrdma" in name
            elif line.startswith("calls="):
                call = True
            elif line[:1].isdigit() or line[:1] in "+-*":
                # A line without a count counts nothing.
                if not call and not device:
                    total += sum(map(int, line.split()[1:]))
                call = False
        counts.append(total)
    return counts


def table(url):
    """Print a line for each client, operation and size."""
    here = pathlib.Path(__file__)
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        library = folder / "cost.so"
        flags = ["-O2", "-fPIC", "-shared", "-fno-builtin", "-fno-tree-loop-distribute-patterns"]
        subprocess.run(["cc", *flags, "-o", library, here.with_name("cost.c")], check=True)
        for torch in ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"):
            command = ["cc", "-shared", "-fPIC", "-o", folder / torch, "-x", "c", "-"]
            subprocess.run(command, input=TORCH, text=True, check=True)
        environment |= {"LD_LIBRARY_PATH": str(folder), "COST_LIBRARY": str(library)}
        preloaded = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
        for client in clients(url):
            alone = [sys.executable, "-P", here, client]
            counted = subprocess.run(
                alone, env=environment | {"LD_PRELOAD": preloaded}, check=True, capture_output=True, text=True
            )
            out = folder / client.replace(" ", "-").replace("/", "-")
            out.mkdir()
            command = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
            command += [f"--callgrind-out-file={out}/out", "--combine-dumps=no"]
            under = subprocess.run(command + alone, env=environment, capture_output=True, text=True)
            lines = counted.stdout.splitlines()
            if under.returncode == 0:
                counts = instructions(out)
            else:
                # Some programs do not run under valgrind. What the others cost is told all the same.
                counts = [float("nan")] * len(lines)
                print(f"{client} under callgrind: {under.stderr.strip()[-300:]}", file=sys.stderr)
            for line, count in zip(lines, counts, strict=True):
                act, mib, copied, cleared, took = line.split()
                size = TURNS * int(mib) * MIB
                row = (act, int(mib), client, count / size, float(copied), float(cleared), float(took))
                rows.append(row)
                print("\t".join(map(str, row)), file=sys.stderr, flush=True)
    print("| | MiB | client | instructions | copied | cleared | ms |\n|---|--:|---|--:|--:|--:|--:|")
    for act, mib, client, count, copied, cleared, took in sorted(rows, key=lambda row: (row[0], row[1])):
        print(
            f"| {act.upper()} | {mib} | {client} | {count:.4f} | {copied:.2f} | {cleared:.2f} | {took:.1f} |"
        )


def main():
    """Print the table, or do one client's work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", nargs="?")
    arguments = parser.parse_args()
    url = os.environ["VALKEY_TEST_URL"]
    if arguments.client:
        work(url, arguments.client)
    else:
        table(url)


main()
