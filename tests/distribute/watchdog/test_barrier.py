"""The start barrier: missing workers are named, strangers are rejected, and TensorFlow gets its port."""

import contextlib
import json
import signal
import socket
import threading
import time

import pytest
import tensorflow as tf
from watched_workers import Workers, free_addresses

from tfopt.distribute.watchdog.barrier import MAGIC, MissingPeerError, Rendezvous, Start, fingerprint, join
from tfopt.distribute.watchdog.channel import Channel
from tfopt.errors import ClusterError


@pytest.fixture
def workers():
    with Workers() as workers:
        yield workers


@contextlib.contextmanager
def connected(address):
    """A connection to an address, as soon as somebody listens there."""
    host, port = address.split(":")
    due = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((host, int(port)), 5)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < due
            time.sleep(0.02)
    with connection:
        yield connection


def answer(connection):
    """What a connection receives until it is closed."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            said += data
    return said


def hello(addresses, **changes):
    fields = {"magic": MAGIC, "job": fingerprint(addresses), "index": 1, "pid": 1, "host": "elsewhere"} | changes
    return json.dumps(fields).encode() + b"\n"


@pytest.mark.slow
def test_a_worker_that_never_comes_is_named_by_all(workers):
    ended = workers.run("", "", "", absent=[1], deadline=2)
    for end in ended.values():
        assert end.code == 1
        assert "MissingPeerError: Expected all 3 workers within 2 s." in end.stderr
        named = end.stderr.partition("no sign of ")[2].partition(" What")[0]
        assert named.startswith("worker 1 (127.0.0.1:"), end
        assert "worker 0" not in named
        assert "worker 2" not in named


@pytest.mark.slow
def test_a_chief_that_never_comes_is_named_by_each(workers):
    ended = workers.run("", "", "", absent=[0], deadline=1)
    for end in ended.values():
        assert end.code == 1
        assert "MissingPeerError: Expected worker 0 (127.0.0.1:" in end.stderr
        assert "Found: Connection refused" in end.stderr


def test_a_worker_that_leaves_while_others_wait_may_come_back(workers):
    addresses = free_addresses(3)
    workers.start(addresses, 0)
    with connected(addresses[0]) as first:
        first.sendall(hello(addresses))
        assert b"welcome" in first.recv(100)
    workers.start(addresses, 1)
    workers.start(addresses, 2)
    assert [end.code for end in workers.wait().values()] == [0, 0, 0]


@pytest.mark.parametrize(("number", "index"), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_signals_work_while_it_waits(workers, number, index):
    addresses = free_addresses(2)
    process = workers.start(addresses, index, deadline=50)
    if index == 0:
        with connected(addresses[0]):
            process.send_signal(number)
    else:
        host, port = addresses[0].split(":")
        with socket.create_server((host, int(port))) as chief:
            chief.accept()[0].close()
            process.send_signal(number)
    assert workers.wait()[index].code == -number


def test_a_worker_of_another_job_is_turned_away(workers):
    addresses = free_addresses(3)
    workers.start(addresses[:2], 0)
    workers.start([addresses[0], addresses[2]], 1)
    process = workers.processes[1]
    process.wait(timeout=60)
    said = workers.said(1, "stderr")
    assert "ClusterError: Expected worker 0 (" in said  # not MissingPeerError: restarting would not help
    assert f"this port belongs to another job, of 2 workers: {addresses[0]}, {addresses[1]}" in said
    workers.start(addresses[:2], 1)
    assert [end.code for end in workers.wait().values()] == [0, 0]


def test_a_second_chief_on_the_port_is_told(workers):
    addresses = free_addresses(3)
    workers.start(addresses[:2], 0)
    ours, theirs = socket.socketpair()
    with connected(addresses[0]), ours, theirs:
        second = Rendezvous(Start((addresses[0], addresses[2]), 0, 1, 1.0), Channel(ours))
        with pytest.raises(ClusterError, match=r"port \d+ to be free for worker 0 .* Address already in use\."):
            second.run()
    workers.start(addresses[:2], 1)
    assert [end.code for end in workers.wait().values()] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"magic": "tfopt-watchdog-0"}, "it speaks 'tfopt-watchdog-0'"),
        ({"job": "0123"}, "this port belongs to another job"),
        ({"index": 0}, "there is no other worker 0"),
        ({"index": True}, "there is no other worker True"),
        ({"index": "1"}, "there is no other worker '1'"),
        ({"index": 2}, "there is a worker 2 already: process 77 on host 'here'"),
    ],
)
def test_a_stranger_is_rejected_with_the_reason(rendezvous, changes, why):
    with connected(rendezvous[0]) as second, connected(rendezvous[0]) as connection:
        second.sendall(hello(rendezvous, index=2, pid=77, host="here"))
        assert b"welcome" in second.recv(100)
        connection.sendall(hello(rendezvous, **changes))
        assert why in json.loads(answer(connection))["rejected"]


def test_only_a_workers_first_message_counts(rendezvous):
    with connected(rendezvous[0]) as connection:
        connection.sendall(hello(rendezvous) + hello(rendezvous) + b'{"more": 1}\n')
        assert connection.recv(1000) == b'{"welcome": true}\n'
        connection.sendall(hello(rendezvous, index=2))


@contextlib.contextmanager
def welcomed(addresses, index):
    """A worker's connection. The chief may briefly still hold one of the same index that hung up."""
    due = time.monotonic() + 30
    while True:
        with connected(addresses[0]) as connection:
            connection.sendall(hello(addresses, index=index))
            if b"welcome" in connection.recv(100):
                yield connection
                return
        assert time.monotonic() < due
        time.sleep(0.05)


@pytest.fixture
def rendezvous():
    """The addresses of a job of three whose chief waits in a thread. On teardown the others come and it succeeds."""
    addresses = tuple(free_addresses(3))
    ours, theirs = socket.socketpair()
    results = []
    thread = threading.Thread(
        target=lambda: results.append(Rendezvous(Start(addresses, 0, 1, 30.0), Channel(ours)).run())
    )
    thread.start()
    yield addresses
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(welcomed(addresses, 1))
        stack.enter_context(welcomed(addresses, 2))
        thread.join(30)
        assert b"go" in one.recv(100)
    (links, _), *_ = results
    for link in links.values():
        link.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 40 + b"\n",
        b"x" * 100_000,
        b"{}\n",
        b"\xff\xfe\n",
        b'{"magic": "tfopt-watchdog-1", "index": ',
    ],
)
def test_garbage_on_the_port_harms_nobody(rendezvous, garbage):
    with connected(rendezvous[0]) as connection:
        with contextlib.suppress(OSError):  # the chief may hang up first
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
        assert b"go" not in answer(connection)


def test_a_silent_newcomer_is_dropped(rendezvous, monkeypatch):
    monkeypatch.setattr("tfopt.distribute.watchdog.barrier._HELLO_SECONDS", 0.2)
    with connected(rendezvous[0]) as connection:
        connection.sendall(b'{"magic"')
        assert answer(connection) == b""  # closed; otherwise this would wait for ever


@contextlib.contextmanager
def something_that_says(said, *, hangs_up):
    """The workers of a job at whose chief's address something else listens and sends `said`."""
    training, other = socket.socketpair()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(training)
        stack.enter_context(other)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection = stack.enter_context(server.accept()[0])
                    connection.sendall(said)
                    if hangs_up:
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield (f"127.0.0.1:{server.getsockname()[1]}", "127.0.0.1:1"), Channel(training)
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_something_else_on_the_port_is_described():
    with (
        something_that_says(b"HTTP/1.1 400 Bad Request\r\n", hangs_up=True) as (addresses, training),
        pytest.raises(ClusterError, match="something else listens there and answers b'HTTP") as error,
    ):
        join(Start(addresses, 1, 1, 1.0), training)
    assert error.type is not MissingPeerError  # restarting would not help


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "something listens there and says nothing"),
        (b'{"welcome": true}\n', "it admitted this worker and has said nothing since"),
    ],
)
def test_a_chief_that_falls_silent_is_missing(monkeypatch, said, why):
    for name in ("_HELLO_SECONDS", "_EXTRA_SECONDS"):
        monkeypatch.setattr(f"tfopt.distribute.watchdog.barrier.{name}", 0.5)
    with (
        something_that_says(said, hangs_up=False) as (addresses, training),
        pytest.raises(MissingPeerError, match=f"the chief, to answer within 0.5 s. Found: {why}"),
    ):
        join(Start(addresses, 1, 1, 0.5), training)


def test_a_message_sent_with_the_go_ahead_is_received():
    training, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, training, other:
        addresses = (f"127.0.0.1:{server.getsockname()[1]}", "127.0.0.1:1")

        def lead():
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b'{"welcome": true}\n{"go": 7}\n{"lost": 0, "status": {}}\n')

        thread = threading.Thread(target=lead)
        thread.start()
        chief, seed = join(Start(addresses, 1, 1, 30.0), Channel(training))
        thread.join()
        assert (seed, wait_for(chief)["lost"]) == (7, 0)
        chief.close()


def test_tensorflow_binds_the_port_beside_the_connections(rendezvous_of_two):
    addresses, links = rendezvous_of_two
    without_gpu = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    server = tf.distribute.Server({"worker": [addresses[0]]}, job_name="worker", task_index=0, config=without_gpu)
    assert server.target == f"grpc://{addresses[0]}"
    links[0].send(still="there")
    assert wait_for(links[1]) == {"still": "there"}


@pytest.fixture
def rendezvous_of_two():
    """The addresses of a job of two after the start, and both ends of its connection."""
    addresses = tuple(free_addresses(2))
    sockets = socket.socketpair()
    results = []
    chief = Rendezvous(Start(addresses, 0, 1, 30.0), Channel(sockets[0]))
    thread = threading.Thread(target=lambda: results.append(chief.run()))
    thread.start()
    link, seed = join(Start(addresses, 1, 2, 30.0), Channel(sockets[1]))
    thread.join()
    (links, same_seed), *_ = results
    assert seed == same_seed
    yield addresses, (links[1], link)
    for each in (links[1], link, *sockets):
        each.close()


def wait_for(channel):
    due = time.monotonic() + 30
    while time.monotonic() < due:
        for message in channel.receive():
            return message
        time.sleep(0.01)
    raise AssertionError("nothing came")
