import itertools
import socket

import pytest

import valkey_rdma

names = (f"test-{number}" for number in itertools.count())
WINDOW = 64 << 10


def pattern(length, seed=0):
    """Bytes of which no two neighbouring kilobytes are alike."""
    block = bytes((index ^ (index >> 8) ^ seed) & 0xFF for index in range(min(length, 1 << 16)))
    whole = bytearray(block * (length // len(block) + 1) if block else b"")[:length]
    whole[::4096] = bytes((index ^ seed) & 0xFF for index in range(len(whole[::4096])))
    return bytes(whole)


@pytest.fixture
def name():
    """The name of an embedded store that no other test uses."""
    return next(names)


@pytest.fixture
def name_of_store(name):
    """The same, where `name` is something else."""
    return name


@pytest.fixture(params=["embedded", "tcp"])
def url(request, name):
    return f"embedded://{name}" if request.param == "embedded" else valkey_rdma.serve_embedded(name)


@pytest.fixture
def client(url):
    with valkey_rdma.Client(url, timeout=30, connect_timeout=30, window=WINDOW) as client:
        yield client


@pytest.fixture
def rdma(name):
    """A client over the embedded fabric alone."""
    with valkey_rdma.Client(f"embedded://{name}", timeout=30, connect_timeout=30, window=WINDOW) as client:
        yield client


class Peer:
    """A server over TCP that sends what a test says, when it says."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)
        self.url = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"

        self.streams = []

    def accept(self):
        self.stream, _ = self.listener.accept()
        self.stream.settimeout(30)
        self.streams.append(self.stream)
        self.received = b""

    def until(self, end):
        """Receives up to and with `end`."""
        while end not in self.received:
            received = self.stream.recv(1 << 16)
            assert received, "the client left"
            self.received += received
        before, _, self.received = self.received.partition(end)
        return before + end

    def close(self):
        self.listener.close()
        for stream in self.streams:
            stream.close()


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()
