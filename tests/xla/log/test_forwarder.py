import os
import tempfile
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.xla.log.forwarder import Forwarder

PREFIX = b"I0000 00:00:1795266330.181223   16901 "
COMPILING = PREFIX + b"xla_compiler.cc:820] XlaCompiler::CompileFunction __inference_f_29[]\n"
COMPILED = PREFIX + b"device_compiler.h:538] Compilation of XLA executable time: 59.4 ms (59408 us) (cumulative\n"
DUMP = b"W" + PREFIX[1:] + b"dump_graph.cc:162] Failed to dump xla_compile_graph___inference_f_29[] because\n"
ONCE = PREFIX + b"device_compiler.h:208] Compiled cluster using XLA!  This line is logged at most once.\n"
WARNING = b"W" + PREFIX[1:] + b"op_kernel.cc:1858] OP_REQUIRES failed\n"


def sort(chunks, hidden="", copy=False):
    """What the forwarder takes and what it lets out, fed with the chunks."""
    with tempfile.TemporaryFile() as lines, tempfile.TemporaryFile() as out:
        forwarder = Forwarder(lines.fileno(), out.fileno(), hidden=hidden, copy=copy)
        for chunk in chunks:
            forwarder.feed(chunk)
        forwarder.flush()
        lines.seek(0)
        out.seek(0)
        return lines.read(), out.read()


def test_only_the_lines_of_compilations_are_taken():
    data = b"before\n" + COMPILING + b"between\n" + DUMP + COMPILED + ONCE + WARNING + b"after"
    assert sort([data]) == (COMPILING + DUMP + COMPILED, b"before\nbetween\n" + ONCE + WARNING + b"after")


@given(st.lists(st.integers(0, 500)))
def test_however_the_text_is_cut(cuts):
    data = b"50 %" + COMPILING + b"\0007\0x\n" + COMPILED + b"100 %\r"
    ends = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    chunks = [data[start:end] for start, end in pairwise(ends)]
    assert sort(chunks) == (COMPILING + b"\0007\0\n" + COMPILED, b"50 %x\n100 %\r")


@given(st.lists(st.binary()))
def test_anything_else_comes_out_as_it_is(chunks):
    chunks = [chunk.replace(b"\0", b"") for chunk in chunks]
    assert sort(chunks) == (b"", b"".join(chunks))


def test_lines_that_the_user_has_hidden_stay_hidden():
    data = COMPILED + ONCE + WARNING + b"E" + WARNING[1:]
    assert sort([data], hidden="IW") == (COMPILED, b"E" + WARNING[1:])
    assert sort([data], hidden="I") == (COMPILED, WARNING + b"E" + WARNING[1:])


def test_lines_that_the_user_has_asked_for_come_out_too():
    assert sort([COMPILING + COMPILED], copy=True) == (COMPILING + COMPILED, COMPILING + COMPILED)


def test_a_part_of_a_line_waits_and_is_let_out():
    with tempfile.TemporaryFile() as out:
        forwarder = Forwarder(out.fileno(), out.fileno(), hidden="", copy=False)
        assert forwarder.feed(b"Continue? ")
        assert not os.fstat(out.fileno()).st_size
        forwarder.flush()
        assert os.fstat(out.fileno()).st_size == len(b"Continue? ")
        assert not forwarder.feed(b"whole\n")


@pytest.mark.parametrize("gone", [True, False])
def test_it_goes_on_where_nobody_reads(gone):
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as lines:
        forwarder = Forwarder(lines.fileno(), writing, hidden="", copy=False)
        if gone:
            os.close(reading)
        forwarder.feed(b"text\n" + COMPILED)
        assert os.fstat(lines.fileno()).st_size == len(COMPILED)
        if not gone:
            assert os.read(reading, 100) == b"text\n"
            os.close(reading)
    os.close(writing)
