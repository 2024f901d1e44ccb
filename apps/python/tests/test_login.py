"""Users, passwords and databases in addresses."""

import asyncio
import contextlib
import threading

import pytest

from valkey_rdma import AsyncClient, Client, ConnectError

WRONG = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"


def named(peer, before="", behind=""):
    return peer.url.replace("tcp://", f"tcp://{before}") + behind


@contextlib.contextmanager
def answering(peer, replies):
    """The next connection's commands are answered so, while a client is made."""

    def answer():
        peer.accept()
        peer.stream.sendall(replies)

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()


def words(*arguments):
    return b"".join(
        [b"*%d\r\n" % len(arguments), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in arguments)]
    )


@pytest.mark.parametrize(
    ("before", "behind", "said"),
    [
        ("", "/", b""),
        ("", "/0", b""),
        (":word@", "", words(b"AUTH", b"word")),
        ("ann:word@", "/", words(b"AUTH", b"ann", b"word")),
        ("ann:@", "", words(b"AUTH", b"ann", b"")),
        ("a%40b:p%3A%2F%25%ff@", "/7", words(b"AUTH", b"a@b", b"p:/%\xff") + words(b"SELECT", b"7")),
        ("", "/12", words(b"SELECT", b"12")),
    ],
)
def test_an_address_says_who_and_where(peer, before, behind, said):
    with answering(peer, b"+OK\r\n" * said.count(b"*") + b":5\r\n"):
        client = Client(named(peer, before, behind), timeout=30)
    assert client.strlen("key") == 5
    assert peer.until(b"key\r\n") == said + words(b"STRLEN", b"key")
    assert repr(client) == f"<valkey_rdma.Client of {peer.url}{behind}>"
    assert client.url == peer.url + behind
    with answering(peer, b"+OK\r\n" * said.count(b"*") + b":6\r\n"):
        again = client.another()
    assert again.strlen("key") == 6
    assert peer.until(b"key\r\n") == said + words(b"STRLEN", b"key"), "each connection says it"


def test_a_refusal_has_the_words_of_the_server_and_no_password(peer):
    with answering(peer, WRONG), pytest.raises(ConnectError, match=r"AUTH.*WRONGPASS") as raised:
        Client(named(peer, "ann:s3cret@"), timeout=30)
    assert "s3cret" not in repr(raised.value)
    refused = pytest.raises(ConnectError, match=r"SELECT.*out of range")
    with answering(peer, b"+OK\r\n-ERR DB index is out of range\r\n"), refused:
        Client(named(peer, ":s3cret@", "/99"), timeout=30)


def test_a_task_is_told_of_a_refusal(peer):
    with answering(peer, WRONG), pytest.raises(ConnectError, match="WRONGPASS"):
        asyncio.run(AsyncClient.connect(named(peer, ":s3cret@"), timeout=30))


def test_the_embedded_store_has_no_users(name):
    with pytest.raises(ConnectError, match="AUTH"):
        Client(f"embedded://:word@{name}")


@pytest.mark.parametrize(
    "url",
    [
        "tcp://s3cret@host",
        "s3cret:s3cret@host",
        "tcp://:s3cret@",
        "tcp://:s3cret@host/one",
        "http://:s3cret@h",
    ],
)
def test_what_is_no_address_shows_no_password(url):
    with pytest.raises(ConnectError, match="an address is") as raised:
        Client(url)
    assert "s3cret" not in repr(raised.value)
