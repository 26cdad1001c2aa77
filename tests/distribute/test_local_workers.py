"""The output of local workers: whole lines, each with its worker, and progress bars cut short. Runs: test_launch.py."""

import os

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from tfopt.distribute.local_workers import Prefixer, write_whole


@pytest.fixture
def clock():
    return Clock(0.0)


@pytest.fixture
def prefixer(clock):
    return Prefixer(b"[0] ", clock=clock)


def test_whole_lines_at_once_and_the_rest_later(prefixer):
    assert prefixer.lines(b"one\ntwo\nthr") == b"[0] one\n[0] two\n"
    assert prefixer.lines(b"") == b""
    assert prefixer.lines(b"ee\n\n") == b"[0] three\n[0] \n"
    assert prefixer.end() == b""


def test_a_line_without_its_end(prefixer):
    assert prefixer.lines(b"last") == b""
    assert prefixer.end() == b"[0] last\n"
    assert prefixer.end() == b""


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_byte_is_lost_whatever_the_pieces(pieces):
    pieces = [piece.replace(b"\r", b"") for piece in pieces]
    prefixer = Prefixer(b"> ")
    out = b"".join(map(prefixer.lines, pieces)) + prefixer.end()
    whole = b"".join(pieces)
    assert out.replace(b"\n> ", b"\n")[2:] == whole + (b"" if whole.endswith(b"\n") or not whole else b"\n")


def test_a_line_without_end_is_cut_and_not_kept(prefixer):
    out = b"".join(prefixer.lines(b"x" * 50_000) for _ in range(10)) + prefixer.end()
    assert out.count(b"x") == 500_000
    assert [len(line) for line in out.split(b"\n")] == [65536 + 4] * 7 + [500_000 - 7 * 65536 + 4, 0]


def test_a_line_that_ends_in_a_carriage_return_where_the_piece_does(prefixer):
    assert [prefixer.lines(piece) for piece in (b"one\r", b"\n", b"two\r")] == [b"", b"[0] one\n", b""]
    assert prefixer.end() == b"[0] two\n"


@given(st.lists(st.text("ab\r\n", max_size=6), max_size=6))
def test_the_pieces_in_which_it_comes_make_no_difference(pieces):
    data = [piece.encode() for piece in pieces]
    at_once, in_pieces = (Prefixer(b"> ", clock=Clock()) for _ in range(2))
    assert b"".join(map(in_pieces.lines, data)) + in_pieces.end() == at_once.lines(b"".join(data)) + at_once.end()


@pytest.mark.parametrize("states", [(b"\r10 %", b"\r20 %", b"\r30 %\n"), (b"10 %\r", b"20 %\r", b"30 %\r\n")])
def test_of_a_progress_bar_the_last_state_stays(prefixer, states):
    assert [prefixer.lines(state) for state in states] == [b"", b"", b"[0] 30 %\n"]


def test_a_progress_bar_is_shown_every_five_seconds(prefixer, clock):
    shown = []
    for step in range(12):
        clock.now = float(step)
        shown.append(prefixer.lines(b"\r%d" % step))
    assert b"".join(shown) == b"[0] 4\n[0] 9\n"


def test_what_is_written_in_pieces_arrives_whole():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, b"-" * 60_000)  # a pipe holds 65,536
    if os.fork() == 0:
        try:
            write_whole(writer, b"x" * 200_000)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b"-" * 60_000 + b"x" * 200_000
    os.wait()
