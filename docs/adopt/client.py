#!/usr/bin/env python3
"""A test client for `valkey-rdma-conformance run client`: client.py HOST PORT.

It connects by TCP, which shows what the suite wants of a client and tests nothing yet. Put your library's connection into
`connect`: an object with `sendall(bytes)`, `recv(most)`, which returns b"" at the end, and `close()`. docs/adopt.md has the rules.
"""
import os
import socket
import sys

LONG = 5 << 20  # more than three of your windows; at most 64 MiB


def connect(host, port):
    return socket.create_connection((host, port), timeout=10)


class Client:
    def __init__(self, stream):
        self.stream = stream
        self.unread = b""

    def more(self):
        received = self.stream.recv(1 << 16)
        if not received:
            raise EOFError("the server left in the middle of a reply")
        self.unread += received

    def take(self, length):
        pieces = [self.unread]
        missing = length - len(self.unread)
        self.unread = b""
        while missing > 0:
            self.more()
            pieces.append(self.unread)
            missing -= len(self.unread)
            self.unread = b""
        whole = b"".join(pieces)
        self.unread = whole[length:]
        return whole[:length]

    def ask(self, *words):
        command = b"*%d\r\n" % len(words)
        command += b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self.stream.sendall(command)
        while b"\r\n" not in self.unread:
            self.more()
        line, self.unread = self.unread.split(b"\r\n", 1)
        return self.take(int(line[1:]) + 2)[:-2] if line[:1] == b"$" else line


def work(client):
    case = os.environ.get("CONFORMANCE_CASE")
    for number in range(2000 if case in ("flow.unhandled", "flow.room-to-ask") else 70):
        assert client.ask(b"ECHO", b"round %d" % number) == b"round %d" % number, "ECHO"
    if case == "keep.idle":
        assert client.ask(b"ECHO", b"idle") == b"idle", "ECHO"
        sys.stdin.read()  # no call of the library until stdin ends
    wraps = (3 << 20,) if case == "xfer.send-memory" else ()  # longer than any send buffer
    for length in (0, 1, 100, 4096, 70_000, 200_000, *wraps):
        value = bytes((length + at) % 251 for at in range(length))
        assert client.ask(b"SET", b"key", value) == b"+OK", "SET"
        assert client.ask(b"GET", b"key") == value, f"GET of {length} bytes"
    assert len(client.ask(b"GET", b"conformance:bytes:%d" % LONG)) == LONG, "a long reply"


if __name__ == "__main__":
    try:
        stream = connect(sys.argv[1], int(sys.argv[2]))
        work(Client(stream))
        try:
            stream.close()
        except OSError:
            if os.environ.get("CONFORMANCE_CASE") != "close.last-reply":
                raise
    except (AssertionError, EOFError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")  # status 1, with the reason on stderr
