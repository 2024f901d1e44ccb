#!/usr/bin/env python3
"""A client for the conformance suite, whose connection is one that a valkey-server makes: a link of the module's.

    link_client.py SOCKET HOST PORT WINDOW

The server has the module links.c and listens on SOCKET. WINDOW is its rdma-rx-size. The exit status is 0 if each answer was right.
"""

import os
import struct
import sys

from resp import Client

PATH, HOST, PORT, WINDOW = sys.argv[1:]
CASE = os.environ.get("CONFORMANCE_CASE", "")
# As the suite's own client: these cases count what comes.
ROUNDS = 2000 if CASE in ("flow.unhandled", "flow.room-to-ask") else 70
MILLISECONDS = 80_000


def command(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in words)


def bulk(value):
    return b"$%d\r\n%s\r\n" % (len(value), value)


def made_up(number, length):
    """The value of `conformance:bytes:LENGTH` in the suite."""
    state, count = (number + 1) * 0x9E37_79B9_7F4A_7C15 % 2**64 | 1, (length + 7) // 8
    words = []
    for _ in range(count):
        state ^= state << 13 & 0xFFFF_FFFF_FFFF_FFFF
        state ^= state >> 7
        state ^= state << 17 & 0xFFFF_FFFF_FFFF_FFFF
        words.append(state)
    return struct.pack(f"<{count}Q", *words)[:length]


server = Client(PATH)


def told(*words):
    server.send(*words)
    try:
        assert server.reply() == "OK"
    except RuntimeError as error:
        sys.exit(str(error))


def swap(request, expected):
    told("LINK.SWAP", request, expected, MILLISECONDS)


told("LINK.OPEN", HOST, PORT)
for number in range(ROUNDS):
    word = b"round %d" % number
    swap(command(b"ECHO", word), bulk(word))
if CASE == "keep.idle":
    swap(command(b"ECHO", b"idle"), bulk(b"idle"))
    sys.stdin.read()
# A value that wraps any send buffer.
LONG = (3 << 20,) if CASE == "xfer.send-memory" else ()
for number, length in enumerate((0, 1, 100, 4096, 70_000, 200_000, *LONG)):
    key, value = b"conformance:%06d" % number, made_up(number, length)
    swap(command(b"SET", key, value) + command(b"GET", key), b"+OK\r\n" + bulk(value))
length = 4 * int(WINDOW) + 1000
swap(command(b"GET", b"conformance:bytes:%d" % length), bulk(made_up(length, length)))
told("LINK.CLOSE")
