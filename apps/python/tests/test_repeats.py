"""On a cluster of one node, which loses the connection of the first command of each kind."""

import asyncio
import collections
import contextlib
import socketserver
import threading

import pytest

from valkey_rdma import AsyncClient, Client, ConnectionLost

PATIENT = {"timeout": 600, "connect_timeout": 600}


class Node(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Conversation)
        self.seen = collections.Counter()
        self.address = "{}:{}".format(*self.server_address)


class Conversation(socketserver.StreamRequestHandler):
    def number(self):
        return int(self.rfile.readline()[1:] or 0)

    def words(self):
        def word():
            length = self.number()
            return self.rfile.read(length + 2)[:length]

        return [word() for _ in range(self.number())]

    def handle(self):
        while words := self.words():
            kind = words[0].decode()
            self.server.seen[kind] += 1
            if kind == "CLUSTER":
                line = f"id0 {self.server.address}@1 master - 0 0 1 connected 0-16383\n"
                reply = f"${len(line)}\r\n{line}\r\n"
            elif self.server.seen[kind] == 1:
                return
            else:
                reply = {"SET": "+OK\r\n", "STRLEN": ":5\r\n"}.get(kind, ":1\r\n")
            self.wfile.write(reply.encode())


@pytest.fixture
def node():
    with Node() as node:
        threading.Thread(target=node.serve_forever, daemon=True).start()
        yield node
        node.shutdown()


def lost(repeats):
    """What a command meets that changes keys, and whose connection is lost."""
    return contextlib.nullcontext() if repeats else pytest.raises(ConnectionLost)


def was_sent(node, repeats):
    changes = 1 + repeats
    assert {kind: node.seen[kind] for kind in ("STRLEN", "EXISTS", "SET", "DEL")} == {
        "STRLEN": 2,
        "EXISTS": 2,
        "SET": changes,
        "DEL": changes,
    }


@pytest.mark.parametrize("repeats", [False, True])
def test_a_client_sends_a_change_again_only_if_it_may(node, repeats):
    with Client(f"tcp+cluster://{node.address}", repeats=repeats, **PATIENT) as client:
        # A read is sent again in either case.
        assert client.strlen("foo") == 5
        assert client.exists("foo") == 1
        with lost(repeats):
            client.set("foo", b"value")
        with lost(repeats):
            assert client.delete("foo") == 1
        was_sent(node, repeats)
        client.set("foo", b"value")


@pytest.mark.parametrize("repeats", [False, True])
def test_an_async_client_sends_a_change_again_only_if_it_may(node, repeats):
    async def work():
        client = await AsyncClient.connect(f"tcp+cluster://{node.address}", repeats=repeats, **PATIENT)
        assert await client.strlen("foo") == 5
        assert await client.exists("foo") == 1
        with lost(repeats):
            await client.set("foo", b"value")
        with lost(repeats):
            assert await client.delete("foo") == 1
        was_sent(node, repeats)
        await client.set("foo", b"value")
        await client.close()

    asyncio.run(work())
