import array
import ctypes
import gc
import mmap
import os
import pickle
import resource
import socket
import sys
import threading
import weakref

import numpy
import pytest
from conftest import WINDOW, pattern

import valkey_rdma
from valkey_rdma import Client, Closed, ConnectError, ConnectionLost, Refused, ValueTooLong

LENGTHS = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 8 * WINDOW, 8 * WINDOW + 1, 40 * WINDOW]


@pytest.mark.parametrize("registered", [True, False])
def test_values_come_back(client, registered):
    room = 40 * WINDOW
    buffer = bytearray(room + 100)
    if registered:
        client.register(buffer)
    part = memoryview(buffer)[50 : 50 + room]
    for seed, length in enumerate(LENGTHS):
        value = pattern(length, seed)
        part[:length] = value
        client.set_from("key", part[:length])
        assert client.strlen(b"key") == length
        buffer[:] = b"\xee" * len(buffer)
        assert client.get_into("key", part) == length
        assert part[:length] == value
        assert buffer == b"\xee" * 50 + value + b"\xee" * (len(buffer) - 50 - length), (
            "bytes beside the value"
        )


def test_registered_memory_is_not_copied(rdma):
    length = 32 * WINDOW
    arena = bytearray(2 * length)
    rdma.register(arena)
    sent, received = memoryview(arena)[:length], memoryview(arena)[length:]
    sent[:] = pattern(length)
    rdma.set_from("key", sent)
    assert rdma.counts == rdma.counts
    assert (rdma.counts.bytes_lent, rdma.counts.bytes_copied) == (length, 0)
    assert rdma.get_into("key", received) == length
    assert received == sent
    counts = rdma.counts
    assert counts.bytes_landed >= length - 2 * WINDOW, counts
    assert counts.bytes_landed + counts.bytes_copied == length, counts


def test_memory_that_is_not_registered_is_copied_and_stays_unregistered(client):
    buffer = bytearray(pattern(8 * WINDOW))
    client.set_from("key", buffer)
    assert client.get_into("key", buffer) == len(buffer)
    counts = client.counts
    assert (counts.bytes_landed, counts.bytes_lent, counts.bytes_copied) == (0, 0, 16 * WINDOW)
    assert client.registrations == 0


@pytest.mark.parametrize("registered", [True, False])
def test_anything_with_the_buffer_protocol(client, registered):
    values = numpy.arange(3 * WINDOW, dtype=numpy.float32).reshape(3, WINDOW)
    kinds = [
        numpy.zeros_like(values),
        numpy.zeros((3, WINDOW, 2), dtype=numpy.float16),
        numpy.zeros(3 * WINDOW, dtype="m8[s]").view("V4")[: 3 * WINDOW],
        array.array("d", bytes(values.nbytes)),
        bytearray(values.nbytes),
        memoryview(bytearray(values.nbytes)).cast("I"),
        mmap.mmap(-1, values.nbytes),
        (ctypes.c_ubyte * values.nbytes)(),
    ]
    client.set_from("key", values)
    client.set_from("bytes", values.tobytes())
    for buffer in kinds:
        if registered:
            client.register(buffer)
        for key in ["key", b"bytes"]:
            assert client.get_into(key, buffer) == values.nbytes
            assert (
                bytes(memoryview(buffer).cast("B")) == values.tobytes()
                if not is_void(buffer)
                else buffer.tobytes() == values.tobytes()
            )
        if registered:
            client.unregister(buffer)


def is_void(buffer):
    return isinstance(buffer, numpy.ndarray) and buffer.dtype.kind == "V"


def test_buffers_that_are_none(client):
    for refused in [
        b"constant",
        memoryview(bytearray(10))[::2],
        numpy.zeros((4, 4)).T[1:],
        memoryview(bytes(4)),
    ]:
        with pytest.raises(BufferError):
            client.get_into("key", refused)
        with pytest.raises(BufferError):
            client.register(refused)
    with pytest.raises(BufferError, match="no bytes"):
        client.register(bytearray())
    with pytest.raises(TypeError):
        client.get_into("key", "text")
    with pytest.raises(TypeError):
        client.get_into(5, bytearray(1))
    assert client.get_into("key", bytearray(1)) is None, "nothing was sent before"


def test_many_values_at_once(client):
    sent = bytearray(pattern(20 * WINDOW, 7))
    client.set_from("one", memoryview(sent)[: 3 * WINDOW + 5])
    client.set_from("two", memoryview(sent)[100 : 100 + 9 * WINDOW])
    arena, other = bytearray(10 * WINDOW), bytearray(10)
    client.register(arena)
    view = memoryview(arena)
    one, two, empty, none, short, again = client.mget_into(
        (
            ("one", view[9 * WINDOW :]),
            (b"two", view[: 9 * WINDOW]),
            ("none", bytearray()),
            ("none", other),
            ("one", other),
            ("two", bytearray(9 * WINDOW)),
        )
    )
    assert isinstance(one, ValueTooLong)
    assert (one.length, one.room) == (3 * WINDOW + 5, WINDOW)
    assert str(one) == f"the value has {3 * WINDOW + 5} bytes, and the buffer {WINDOW}"
    assert str(pickle.loads(pickle.dumps(one))) == str(one)
    assert (two, empty, none, again) == (9 * WINDOW, None, None, 9 * WINDOW)
    assert isinstance(short, ValueTooLong)
    assert view[: 9 * WINDOW] == sent[100 : 100 + 9 * WINDOW]
    assert client.mget_into([]) == []
    assert client.exists("one", "none", "two", "one") == 3
    assert client.delete("one", "none") == 1
    assert client.get_into("one", other) is None
    for call in [client.exists, client.delete]:
        with pytest.raises(TypeError, match="at least one key"):
            call()


def test_many_values_are_set_at_once(client):
    arena = bytearray(pattern(12 * WINDOW))
    client.register(arena)
    values = [
        memoryview(arena)[: 5 * WINDOW],
        bytes(3),
        b"",
        memoryview(arena)[5 * WINDOW :],
        pattern(4 * WINDOW),
    ]
    assert client.mset_from((f"key {number}", value) for number, value in enumerate(values)) == [None] * 5
    for number, value in enumerate(values):
        buffer = bytearray(len(value))
        assert client.get_into(f"key {number}", buffer) == len(value)
        assert buffer == value
    assert client.counts.bytes_lent in (0, 12 * WINDOW)
    assert client.mset_from([]) == []


def test_one_of_many_is_refused(peer):
    client = Client(peer.url, timeout=30)
    peer.accept()
    peer.stream.sendall(b"+OK\r\n-OOM command not allowed\r\n+OK\r\n")
    first, second, third = client.mset_from([("a", b"1"), ("b", b"2"), ("c", b"3")])
    assert (first, third) == (None, None)
    assert isinstance(second, Refused)


def test_a_value_that_is_too_long_leaves_the_client_usable(client):
    client.set_from("key", pattern(5 * WINDOW))
    with pytest.raises(ValueTooLong) as raised:
        client.get_into("key", bytearray(5 * WINDOW - 1))
    assert (raised.value.length, raised.value.room) == (5 * WINDOW, 5 * WINDOW - 1)
    assert client.strlen("key") == 5 * WINDOW


def test_a_registered_buffer_is_held(rdma):
    buffer = bytearray(100)
    rdma.register(buffer)
    with pytest.raises(BufferError):
        buffer.append(1)
    with pytest.raises(BufferError, match="registered already"):
        rdma.register(memoryview(buffer)[99:])
    assert rdma.registrations == 1
    rdma.unregister(buffer)
    buffer.append(1)
    assert rdma.registrations == 0
    with pytest.raises(BufferError, match="not registered"):
        rdma.unregister(buffer)

    mapping = mmap.mmap(-1, 4096)
    rdma.register(mapping)
    with pytest.raises(BufferError):
        mapping.close()
    values = numpy.zeros(1000)
    alive = weakref.ref(values)
    rdma.register(values)
    del values
    gc.collect()
    assert alive() is not None, "the client keeps it"
    rdma.close()
    mapping.close()


def test_closing_the_last_client_gives_buffers_back(url):
    buffer = bytearray(100)
    first = Client(url)
    first.register(buffer)
    second = first.another()
    assert second.registrations == 1
    first.close()
    del first
    second.set_from("key", buffer)
    assert second.get_into("key", buffer) == 100
    with pytest.raises(BufferError):
        buffer.append(1)
    second.close()
    del second
    buffer.append(1)


def test_a_thread_that_looks_does_not_delay_a_release(name):
    """Releasing needs the interpreter, which the thread that looks holds."""
    current, stop = [Client(f"embedded://{name}")], threading.Event()

    def look():
        while not stop.is_set():
            assert current[0].registrations <= 1

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        current[0] = client = Client(f"embedded://{name}")
        arena = bytearray(100)
        client.register(arena)
        client.close()
        arena.append(1)
    stop.set()
    for thread in threads:
        thread.join()


def test_siblings_share_what_is_registered(rdma):
    length = 8 * WINDOW
    arena = bytearray(pattern(2 * length))
    with rdma.another() as other:
        other.register(arena)
        rdma.set_from("key", memoryview(arena)[:length])
        assert rdma.counts.bytes_lent == length
        assert other.get_into("key", memoryview(arena)[length:]) == length
        assert other.counts.bytes_landed > 0
        assert arena[:length] == arena[length:]


def test_a_buffer_in_use_is_not_resized(peer):
    client = Client(peer.url, timeout=30)
    peer.accept()
    buffer = bytearray(10)
    got = []
    thread = threading.Thread(target=lambda: got.append(client.get_into("key", buffer)))
    thread.start()
    # This thread goes on while that one waits.
    peer.until(b"$3\r\nkey\r\n")
    with pytest.raises(BufferError):
        buffer.append(1)
    peer.stream.sendall(b"$10\r\n0123456789\r\n")
    thread.join()
    assert got == [10]
    assert buffer == b"0123456789"
    buffer.append(1)


def test_errors_of_the_server(peer):
    client = Client(peer.url, timeout=30)
    peer.accept()
    peer.stream.sendall(b"-WRONGTYPE Operation\r\n-OOM command not allowed\r\n")
    with pytest.raises(Refused, match="WRONGTYPE Operation"):
        client.get_into("key", bytearray(10))
    with pytest.raises(Refused, match="OOM"):
        client.set_from("key", b"value")
    peer.stream.sendall(b":5\r\n")
    buffer = bytearray(10)
    with pytest.raises(ConnectionLost, match="none to this command"):
        client.get_into("key", buffer)
    buffer.append(1)
    with pytest.raises(ConnectionLost, match="lost before"):
        client.strlen("key")
    with pytest.raises(ConnectionLost, match="lost before"):
        client.register(buffer)


def test_get_and_set(client):
    assert client.get("none") is None
    long = pattern(300000, 1)
    for value, expected in [
        ("größer", "größer".encode()),
        (b"", b""),
        (bytearray(b"abc"), b"abc"),
        (long, long),
    ]:
        client.set("key", value)
        assert client.get("key") == expected
    with pytest.raises(TypeError):
        client.set("key", 1)


def test_a_value_that_grows_while_it_is_got(peer):
    client = Client(peer.url, timeout=30)
    peer.accept()
    peer.stream.sendall(b":1\r\n$3\r\nabc\r\n$3\r\nabc\r\n")
    assert client.get("key") == b"abc"
    # Not for ever.
    peer.stream.sendall(b":0\r\n$1\r\na\r\n$2\r\nab\r\n$3\r\nabc\r\n")
    with pytest.raises(ValueTooLong):
        client.get("key")


def test_a_server_that_goes_in_the_middle(peer):
    client = Client(peer.url, timeout=30)
    peer.accept()
    peer.stream.sendall(b"$1000000\r\nonly these")
    peer.stream.shutdown(socket.SHUT_WR)
    buffer = bytearray(1000000)
    client.register(buffer)
    with pytest.raises(ConnectionLost, match=peer.url):
        client.get_into("key", buffer)
    assert client.registrations == 1, "it serves the next connection"
    again = client.another()
    peer.accept()
    peer.stream.sendall(b"$3\r\nabc\r\n")
    assert again.get_into("key", buffer) == 3
    again.unregister(buffer)
    buffer.append(1)


def test_a_server_that_says_nothing(peer):
    client = Client(peer.url, timeout=0.05)
    buffer = bytearray(10)
    with pytest.raises(TimeoutError, match=f"{peer.url}: .*took longer") as raised:
        client.get_into("key", buffer)
    assert isinstance(raised.value, valkey_rdma.CommandTimeout)
    assert isinstance(raised.value, ConnectionLost)
    buffer.append(1)


def test_a_connection_whose_server_takes_nothing_leaves_the_arena(name):
    """The connection that is lost by the time-out lets go of what it was to send."""
    with socket.create_connection(serve_embedded_at(name)) as holder:
        client = Client(f"embedded://{name}", timeout=0.2, window=WINDOW)
        arena = bytearray(pattern(64 << 20))
        client.register(arena)
        # The store serves no client meanwhile. 4 GiB take longer than the time-out without this, too.
        holder.sendall(b"DEBUG SLEEP 3\r\n")
        with pytest.raises(valkey_rdma.CommandTimeout):
            client.mset_from([("key", arena)] * 64)
        client.unregister(arena)
        arena.append(1)
        assert holder.recv(10) == b"+OK\r\n"


def serve_embedded_at(name):
    host, port = valkey_rdma.serve_embedded(name).removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def test_a_connection_that_is_lost_in_the_middle_leaves_the_arena(rdma, name):
    """Wherever the time-out strikes: before the command was sent, or with windows in the arena."""
    length = 64 * WINDOW
    rdma.set_from("key", pattern(length))
    late = 0
    for timeout in [1e-6, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]:
        arena = bytearray(length)
        client = Client(f"embedded://{name}", timeout=timeout, window=WINDOW)
        client.register(arena)
        try:
            client.get_into("key", arena)
        except valkey_rdma.CommandTimeout:
            late += 1
        assert client.registrations == 1
        client.unregister(arena)
        arena.append(1)
        client.close()
    assert late > 0


def test_a_buffer_that_is_unregistered_in_use_is_held_until_then(peer):
    client = Client(peer.url, timeout=30)
    peer.accept()
    arena = bytearray(5)
    client.register(arena)
    thread = threading.Thread(target=client.get_into, args=["key", arena])
    thread.start()
    peer.until(b"key\r\n")
    assert client.registrations == 1, "it can be asked while a command waits"
    client.unregister(arena)
    with pytest.raises(BufferError):
        arena.append(1)
    peer.stream.sendall(b"$5\r\nvalue\r\n")
    thread.join()
    arena.append(1)
    assert arena == b"value\x01"


def test_a_server_that_is_slow(peer):
    """The time-out is that of the whole command."""
    client = Client(peer.url, timeout=0.3)
    peer.accept()
    buffer, stop = bytearray(1000), threading.Event()

    def trickle():
        peer.stream.sendall(b"$1000\r\n")
        while not stop.wait(0.05):
            peer.stream.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(valkey_rdma.CommandTimeout):
        client.get_into("key", buffer)
    stop.set()
    thread.join()
    buffer.append(1)


def test_addresses(name, peer):
    for refused in ["", "host", "http://host", "tcp://", "tcp://host/0/1", "tcp://host#db"]:
        with pytest.raises(ConnectError, match="an address is"):
            Client(refused)
    with pytest.raises(ConnectError, match=r"option 2 is none of .*huge_pages=yes\|no") as unknown:
        Client(f"embedded://{name}?huge_pages=yes&s3cret")
    assert "s3cret" not in str(unknown.value)
    with pytest.raises(ConnectError, match="ack_timeout"):
        Client(f"embedded://{name}?ack_timeout=32")
    Client(f"embedded://{name}?ack_timeout=16&huge_pages=yes").close()
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1: .*refused"):
        Client("tcp://127.0.0.1:1")
    with pytest.raises(ConnectError):
        Client("tcp://no-such-host.invalid:1")
    for name_of, value in [("timeout", 0), ("timeout", -1.0), ("connect_timeout", float("nan"))]:
        with pytest.raises(ValueError, match=name_of):
            Client(f"embedded://{name}", **{name_of: value})
    with pytest.raises(ConnectError, match="window"):
        Client(f"embedded://{name}", window=0)
    Client(peer.url + "/").close()
    assert repr(Client(peer.url)) == f"<valkey_rdma.Client of {peer.url}>"


def test_a_machine_without_rdma():
    """On one with a device, the address is one where nothing listens."""
    with pytest.raises(ConnectError) as raised:
        Client("rdma://127.0.0.1:1", connect_timeout=5)
    text = str(raised.value)
    assert any(
        part in text for part in ["librdmacm", "no RDMA device", "nothing listens", "cannot be reached"]
    ), text


def test_a_closed_client(client):
    client.close()
    client.close()
    for call in [lambda: client.exists("key"), client.another, lambda: client.register(bytearray(1))]:
        with pytest.raises(Closed, match="closed") as raised:
            call()
        # Loops that try again after an error of a connection would not end.
        assert not isinstance(raised.value, ConnectionError)


def test_several_threads_share_a_client(client):
    def work(number):
        buffer = bytearray(3 * WINDOW)
        for turn in range(10):
            value = pattern(2 * WINDOW + turn, number)
            client.set_from(f"key {number}", value)
            assert client.get_into(f"key {number}", buffer) == len(value)
            assert buffer[: len(value)] == value

    errors = []

    def caught(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_references_are_given_back(client):
    key, buffer = b"a key", bytearray(100)
    client.set_from(key, buffer)
    before = [sys.getrefcount(one) for one in [client, key, buffer]]
    for _ in range(100):
        client.set_from(key, buffer)
        client.get_into(key, buffer)
        client.mget_into([(key, buffer)])
        client.register(buffer)
        client.unregister(buffer)
        with pytest.raises(ValueTooLong):
            client.get_into(key, memoryview(buffer)[:1])
    assert [sys.getrefcount(one) for one in [client, key, buffer]] == before


def test_a_store_survives_a_lack_of_descriptors(rdma, name):
    rdma.set_from("key", b"value")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes = set()
    for spare in range(40):
        # Of both ends, which are in this process, the store's finds none at some of these limits.
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, before[1]))
        try:
            valkey_rdma.Client(f"embedded://{name}", connect_timeout=1, window=WINDOW).close()
            outcomes.add("connected")
        except valkey_rdma.ConnectError:
            outcomes.add("refused")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert outcomes == {"connected", "refused"}
    with valkey_rdma.Client(f"embedded://{name}", timeout=30, connect_timeout=30, window=WINDOW) as client:
        assert client.strlen("key") == 5
