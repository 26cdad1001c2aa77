import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.distribute.watchdog.channel import LINE_BYTES, Channel, readable


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_messages_in_pieces(pair):
    channel, other = pair
    assert list(channel.receive()) == []
    other.sendall(b'{"a": 1}\n{"b"')
    assert list(channel.receive()) == [{"a": 1}]
    other.sendall(b": 2}\n")
    assert list(channel.receive()) == [{"b": 2}]
    assert not channel.closed


def test_half_a_message_before_the_end_is_dropped(pair):
    channel, other = pair
    other.sendall(b'{"a": 1}\n{"b": 2}')
    other.close()
    assert list(channel.receive()) == [{"a": 1}]
    assert list(channel.receive()) == []
    assert channel.closed


def test_messages_sent_before_the_other_end_closed_are_read(pair):
    channel, other = pair
    other.sendall(b'{"ended": "x"}\n')
    other.close()
    channel.send(beat=1)
    channel.send(beat=1)
    assert list(channel.receive()) == [{"ended": "x"}]


@pytest.mark.parametrize("size", [LINE_BYTES + 1, 60_000])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_too_long_closes_it(pair, size, end):
    channel, other = pair
    line = b'{"a": "' + b"x" * size + b'"}'
    other.sendall(line + end)
    assert list(channel.receive()) == []
    assert channel.closed
    assert channel.garbage == line[:80]


def test_a_reader_that_hangs_closes_it(pair):
    channel, _ = pair
    for _ in range(10_000):
        channel.send(text="x" * 4000)
    assert channel.closed


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_message_or_closes_it(data):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        theirs.sendall(data + b"\n")
        assert all(isinstance(message, dict) for message in channel.receive())
    channel.close()


def test_readable_returns_sources_with_data_and_skips_closed_ones(pair):
    channel, other = pair
    silent, end = socket.socketpair()
    with silent, end:
        closed = Channel(end.dup())
        closed.close()
        assert readable([channel, silent, closed], 0.0) == []
        other.sendall(b"\n")
        assert readable([channel, silent, closed], 10.0) == [channel]
