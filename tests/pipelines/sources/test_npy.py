import io
import itertools
import os
import re
import signal
import struct

import numpy as np
import pytest
import tensorflow as tf
from python_child import run_python
from quick import first_quick

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.sources.npy import npy

TYPES = ["bool", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16"]


@pytest.fixture
def saved(tmp_path):
    """Saves an array; returns the path."""

    def save(array, name="array.npy"):
        np.save(tmp_path / name, array)
        return str(tmp_path / name)

    return save


def save_at(path, array, remainder, shape=None):
    """Saves an array whose data begin so many bytes behind a multiple of 64, as other writers' may."""
    header = repr({"descr": array.dtype.str, "fortran_order": False, "shape": shape or array.shape}).encode()
    header += b" " * ((remainder - 11 - len(header)) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + array.tobytes())
    return str(path)


def rows(dataset):
    return np.concatenate([batch.numpy() for batch in dataset])


@pytest.mark.parametrize(("remainder", "dtype"), first_quick(itertools.product((5, 0, 16), TYPES), 6, every=4))
def test_rows_come_back_whole_and_in_order(tmp_path, dtype, remainder):
    array = (np.arange(60).reshape(10, 3, 2) * 7 % (2 if dtype == "bool" else 100)).astype(dtype)
    path = save_at(tmp_path / "array.npy", array, remainder)
    found = rows(build_pipeline(npy(path), batch_size=4, training=False))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


@pytest.mark.parametrize("remainder", [0, 16])
def test_rows_can_be_read_one_by_one(tmp_path, remainder):
    array = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
    source = npy(save_at(tmp_path / "array.npy", array, remainder))
    dataset = build_pipeline(source, batch_size=5, training=False, transform=lambda row: row + 1, cache=None)
    assert dataset.element_spec.shape.as_list() == [5, 3, 2]
    np.testing.assert_array_equal(rows(dataset), array + 1)


def test_what_is_mapped_is_not_cached_again(saved):
    plan = plan_pipeline(npy(saved(np.zeros((8, 2)))), batch_size=4)
    assert plan.stage("decode").setting == "whole batches"


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads /proc, which Linux has")

EPOCH = """
import sys
from tfopt.pipelines import build_pipeline
from tfopt.pipelines.sources.npy import npy

def anonymous_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

before = anonymous_mib()
dataset = build_pipeline(npy(sys.argv[1]), batch_size=64, **eval(sys.argv[2]))
for batch in dataset:
    pass
print(anonymous_mib() - before)
print(*{line.split()[1] for line in open("/proc/self/maps") if sys.argv[1] in line})
"""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("remainder", [0, 16])
def test_an_epoch_takes_no_memory_and_cannot_write(tmp_path, remainder):
    path = tmp_path / "large.npy"
    save_at(path, np.zeros(0, np.float32), remainder, shape=(16384, 4096))
    os.truncate(path, path.stat().st_size + 2**28)
    growth, permissions = run_python(EPOCH, path, {"cache": None}).split("\n")[:2]
    assert int(growth) < 128
    assert permissions == "r--s"


def test_a_file_larger_than_the_memory_is_mapped(tmp_path):
    path = tmp_path / "huge.npy"
    with open(path, "wb") as file:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (2**30, 256)}
        np.lib.format.write_array_header_1_0(file, shape)
        start = file.tell()
        try:
            file.truncate(start + 2**40)
        except OSError as error:
            pytest.skip(f"this file system has no files of 1 TiB: {error}")
        file.seek(-1024, os.SEEK_END)
        file.write(np.arange(256, dtype="f4").tobytes())
    source = npy(path)
    np.testing.assert_array_equal(source.decode(tf.constant([2**30 - 1, 0], tf.int64)), [np.arange(256), np.zeros(256)])


def test_rows_are_read_on_the_host(saved):
    """Traced as they are read eagerly, on whatever device is asked for: a GPU would get a copy of the whole file."""
    source = npy(saved(np.zeros((4, 2))))

    def read(at):
        with tf.device("/device:GPU:0"):
            return source.decode(at)

    graph = tf.function(read).get_concrete_function(tf.TensorSpec((2,), tf.int64)).graph
    gathers = [one for one in graph.get_operations() if one.type.startswith("Gather")]
    assert gathers
    assert all("CPU" in one.device for one in gathers)


CUT = """
import os, sys
from tfopt.pipelines import build_pipeline
from tfopt.pipelines.sources.npy import npy

batches = iter(build_pipeline(npy(sys.argv[1]), batch_size=64, training=False))
next(batches)
os.truncate(sys.argv[1], 4096)
for batch in batches:
    pass
"""


@pytest.mark.slow
def test_a_file_cut_while_it_is_read_ends_the_process(saved):
    run_python(CUT, saved(np.zeros((65536, 256))), ends_with=-signal.SIGBUS)


REFUSED = [
    (np.array(["a", "bb"]), r"the type <U2\. Pass strings in memory: arrays\(np\.load\(path\)\)"),
    (np.array([b"a"]), r"the type \|S1\. Pass strings in memory"),
    (np.array([1, None], object), r"the type object\. Save numbers"),
    (np.zeros(3, [("a", "i4")]), r"Save each field as a file of its own"),
    (np.arange(3).astype(tf.bfloat16.as_numpy_dtype), r"bfloat16 as array\.view\(np\.uint16\) with tf\.bitcast"),
    (np.zeros(3, "M8[s]"), r"datetime64\[s\]\. Save it as numbers"),
    (np.zeros(3, np.longdouble), r"Save it as float64"),
    (np.zeros(3, ">i4"), r"the type >i4, of another byte order.*newbyteorder\('='\)"),
    (np.asfortranarray(np.zeros((3, 4))), r"Fortran order.*np\.ascontiguousarray"),
    (np.float32(3), r"Found a scalar\. Save an array with a row for each example"),
    (np.zeros((0, 3)), r"at least one example\. Found none in"),
]


@pytest.mark.parametrize(("array", "message"), REFUSED)
def test_what_cannot_be_mapped_is_refused_with_a_way_out(saved, array, message):
    path = saved(array)
    with pytest.raises(PipelineError, match=rf"{re.escape(repr(path))}.*{message}|{message}.*{re.escape(repr(path))}"):
        npy(path)


def test_a_pipeline_keeps_a_file_that_is_replaced_and_the_next_one_refuses_it(saved):
    path = saved(np.zeros(4))
    source = npy(path)
    before = source.fingerprint()
    assert npy(path).fingerprint() == before
    built = build_pipeline(source, batch_size=4, training=False)
    replacement = saved(np.ones(4), "other.npy")
    os.utime(replacement, ns=(1, 1))
    os.replace(replacement, path)
    assert rows(built).tolist() == [0, 0, 0, 0]
    assert source.fingerprint() not in (before, npy(path).fingerprint())
    with pytest.raises(PipelineError, match=r"\AExpected '.*array\.npy' as it was .* Make the source again\.\Z"):
        build_pipeline(source, batch_size=4)
    assert rows(build_pipeline(path, batch_size=4, training=False)).tolist() == [1, 1, 1, 1]


def test_an_archive_is_refused_with_the_lines_that_read_it(tmp_path):
    path = str(tmp_path / "data.npz")
    np.savez(path, x=np.arange(12).reshape(6, 2), y=np.arange(6))
    with pytest.raises(PipelineError, match="an archive of 2 arrays") as refusal:
        plan_pipeline(path, batch_size=2)
    _, load, _, pair, _ = re.split(r"`|such as |, or save", str(refusal.value))[:5]
    scope = {"np": np, "path": path}
    exec(load, scope)
    dataset = build_pipeline(eval(pair, scope), batch_size=3, training=False)
    assert [(x.tolist(), y.tolist()) for x, y in dataset.as_numpy_iterator()] == [
        ([[0, 1], [2, 3], [4, 5]], [0, 1, 2]),
        ([[6, 7], [8, 9], [10, 11]], [3, 4, 5]),
    ]


def _header(text):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n" + bytes(16)


def _saved(save, *arrays):
    with io.BytesIO() as file:
        save(file, *arrays)
        return file.getvalue()


WHOLE, ARCHIVE = _saved(np.save, np.zeros(10)), _saved(np.savez, np.arange(12), np.arange(6))
FILES = [
    *((WHOLE[:length], "Cannot read its header") for length in (0, 3, 8, 60)),
    *((WHOLE[:length], "Expected 208 bytes.*it is cut") for length in (128, 128 + 79)),
    (WHOLE + WHOLE, r"Expected 208 bytes.*Found 416: something follows the array"),
    (b"a text that is longer than a header", "Cannot read its header: the magic string is not correct"),
    *((ARCHIVE[:length], "Cannot read its header") for length in (3, 100, -60, -1)),
    (_header("{'descr': '<f8', 'fortran_"), "header.* Write it again"),
    (_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -2)}"), "header.* Write it again"),
    (_header("{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2)}"), "header.* Write it again"),
    (_header("  {'a'\n 3"), "header.* Write it again"),
]


@pytest.mark.parametrize(("contents", "message"), FILES)
def test_files_that_are_cut_damaged_or_of_another_kind_are_refused(tmp_path, contents, message):
    (tmp_path / "array.npy").write_bytes(contents)
    with pytest.raises(PipelineError, match=message) as refusal:
        plan_pipeline(str(tmp_path / "array.npy"), batch_size=2)
    assert str(tmp_path / "array.npy") in str(refusal.value)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"Expected a \.npy file at '.*none\.npy'\. No such file or directory"):
        npy(tmp_path / "none.npy")
    with pytest.raises(PipelineError, match="Is a directory"):
        npy(tmp_path)
