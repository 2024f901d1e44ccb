import functools
import threading
import time

import pytest
from conftest import WINDOW, pattern

import valkey_rdma
from valkey_rdma.pool import Pool


@pytest.fixture
def pool(url):
    pool = Pool(url, 3, timeout=30, window=WINDOW)
    yield pool
    pool.close()


def results(pool, jobs):
    ended, told = threading.Event(), []

    def done(results):
        told.extend(results)
        ended.set()

    pool.submit(jobs, done)
    assert ended.wait(30), "the jobs never end"
    return told


def test_jobs_are_done_on_connections_that_share_an_arena(pool):
    length = 8 * WINDOW
    arena = bytearray(20 * length)
    pool.register(arena)
    stored = [memoryview(arena)[number * length : (number + 1) * length] for number in range(10)]
    loaded = [memoryview(arena)[(10 + number) * length : (11 + number) * length] for number in range(10)]
    for number, view in enumerate(stored):
        view[:] = pattern(length, number)

    def store(number, client):
        client.set_from(f"key {number}", stored[number])
        return number

    def load(number, client):
        return client.get_into(f"key {number}", loaded[number])

    assert results(pool, [functools.partial(store, number) for number in range(10)]) == list(range(10))
    assert results(pool, [functools.partial(load, number) for number in range(10)]) == [length] * 10
    assert stored == loaded
    if any(counts.bytes_lent for counts in pool.counts):
        assert sum(counts.bytes_lent for counts in pool.counts) == 10 * length
        assert sum(counts.bytes_landed for counts in pool.counts) >= 10 * 5 * WINDOW
    assert results(pool, []) == []


def test_a_job_that_fails_is_told_and_the_others_are_done(pool):
    def fails(_client):
        raise ValueError("no")

    first, second = results(pool, [fails, lambda client: client.exists("key")])
    assert isinstance(first, ValueError)
    assert second == 0


def test_a_job_whose_connection_is_lost_is_told_so_and_the_next_one_has_another(peer):
    pool = Pool(peer.url, 1, timeout=30, window=WINDOW)
    peer.accept()
    told, ended = [], threading.Event()
    pool.submit([lambda client: client.set("key", b"value")], lambda got: (told.extend(got), ended.set()))
    peer.until(b"value\r\n")
    peer.stream.close()
    assert ended.wait(30)
    assert [type(result) for result in told] == [valkey_rdma.ConnectionLost], "it may have been set"
    ended.clear()
    pool.submit([lambda client: client.exists("key")], lambda got: (told.extend(got), ended.set()))
    peer.accept()
    assert peer.until(b"key\r\n") == b"*2\r\n$6\r\nEXISTS\r\n$3\r\nkey\r\n", "the SET came again"
    peer.stream.sendall(b":1\r\n")
    assert ended.wait(30)
    assert told[1:] == [1]
    pool.close()


def test_a_job_that_may_be_repeated_is(peer):
    pool = Pool(peer.url, 1, timeout=30, window=WINDOW, repeats=True)
    peer.accept()
    arena = bytearray(10)
    pool.register(arena)
    told, ended = [], threading.Event()
    pool.submit([lambda client: client.get_into("key", arena)], lambda got: (told.extend(got), ended.set()))
    peer.until(b"key\r\n")
    peer.stream.sendall(b"$10\r\nonly")
    peer.stream.close()
    peer.accept()
    assert peer.until(b"key\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
    peer.stream.sendall(b"$10\r\n0123456789\r\n")
    assert ended.wait(30)
    assert told == [10]
    assert arena == b"0123456789"
    pool.close()
    arena.append(1)


def test_what_was_not_begun_is_given_up(peer):
    pool = Pool(peer.url, 1, timeout=30, window=WINDOW)
    peer.accept()
    told, ended = [], threading.Event()
    jobs = [lambda client: client.exists("key")] * 3
    pool.submit(jobs, lambda got: (told.extend(got), ended.set()))
    peer.until(b"key\r\n")
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not pool._closing:
        time.sleep(0.01)
    peer.stream.sendall(b":1\r\n")
    closing.join()
    assert ended.is_set()
    assert told[0] == 1, "it was begun"
    assert [type(result) for result in told[1:]] == [valkey_rdma.Closed] * 2
    peer.stream.setblocking(False)
    assert peer.received == b""
    assert peer.stream.recv(1) == b"", "the others were not sent"


def test_a_server_that_is_not_there():
    with pytest.raises(valkey_rdma.ConnectError):
        Pool("tcp://127.0.0.1:1", 2, timeout=1, window=WINDOW)


def test_a_pool_that_was_closed_gives_up_at_once(pool):
    pool.close()
    told = results(pool, [lambda client: client.exists("key")] * 2)
    assert [type(result) for result in told] == [valkey_rdma.Closed] * 2
    with pytest.raises(valkey_rdma.Closed):
        pool.call(lambda client: client.exists("key"))
    pool.close()


def test_whatever_is_given_while_a_pool_closes_ends(name):
    def give(pool, begin, told):
        begin.wait()
        for _ in range(50):
            pool.submit([lambda client: client.exists("key")] * 3, told.append)

    for _ in range(20):
        pool = Pool(f"embedded://{name}", 2, timeout=30, window=WINDOW)
        begin, told = threading.Barrier(3), []
        givers = [threading.Thread(target=give, args=[pool, begin, told]) for _ in range(2)]
        for giver in givers:
            giver.start()
        begin.wait()
        pool.close()
        for giver in givers:
            giver.join()
        assert [len(results) for results in told] == [3] * 100


def test_a_callback_that_fails_is_logged_and_no_worker_lost(url, caplog):
    pool = Pool(url, 1, timeout=30, window=WINDOW)

    def fails(_results):
        raise ValueError("of the callback")

    pool.submit([lambda client: client.exists("key")], fails)
    assert results(pool, [lambda client: client.exists("key")]) == [0]
    assert "of the callback" in caplog.text
    pool.close()


def test_a_job_that_ends_by_no_exception_is_told(pool):
    def ends(_client):
        raise SystemExit("a job")

    (told,) = results(pool, [ends])
    assert isinstance(told, SystemExit)
    with pytest.raises(SystemExit):
        pool.call(ends)


def test_a_callback_may_wait_for_a_job(url):
    pool = Pool(url, 1, timeout=30, window=WINDOW)
    told, ended = [], threading.Event()

    def done(_results):
        told.append(pool.call(lambda client: client.exists("key")))
        ended.set()

    pool.submit([lambda client: client.set_from("key", b"value")], done)
    assert ended.wait(30), "the callback waits for the thread that has called it"
    assert told == [1]
    pool.close()


def test_the_defaults(url):
    pool = Pool(url)
    assert len(pool.counts) == 4
    pool.close()
