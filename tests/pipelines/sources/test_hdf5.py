import fcntl
import os
import re
from dataclasses import replace

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.plan import place_of
from tfopt.pipelines.sources import hdf5 as module
from tfopt.pipelines.sources.hdf5 import hdf5
from tfopt.pipelines.stages import order_stages

COUNT = 50


@pytest.fixture
def path(tmp_path):
    """A file with a dataset of each kind that can be read, each row with its number in it."""
    numbers = np.arange(COUNT)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["numbers"] = numbers
        file.create_dataset("images", data=_images(), chunks=(7, 4, 2), compression="gzip")
        file["deep/er/numbers"] = numbers * 10
        file["deep/link"] = h5py.SoftLink("er/numbers")
        file["link"] = h5py.SoftLink("/deep/link")
        for dtype in ("bool", "f2", "f8", "u1", ">i4", ">f4", "c8"):
            file[f"types/{dtype}"] = numbers.astype(dtype)
        file["texts"] = [f"{number} ü" for number in numbers]
        file["bytes"] = np.array([f"{number}".encode() for number in numbers])
    return tmp_path / "data.h5"


@pytest.fixture
def add(path):
    """Adds something to the file; returns the file's path."""

    def change(function):
        with h5py.File(path, "a") as file:
            function(file)
        return path

    return change


@pytest.fixture
def small_blocks(monkeypatch):
    """Reads blocks of 7 rows of the images, one chunk."""
    monkeypatch.setattr(module, "_BLOCK_BYTES", 64)


def _images():
    return np.arange(COUNT * 8, dtype=np.int32).reshape(COUNT, 4, 2)


def numbers_of(dataset):
    return [int(number) for numbers, _ in dataset for number in numbers]


@pytest.mark.parametrize("blocks", ["whole", "small"])
def test_rows_come_back_whole_and_in_order(path, blocks, request):
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    dataset = build_pipeline(hdf5(path, ("numbers", "images")), batch_size=8, training=False)
    assert [spec.shape.as_list() for spec in dataset.element_spec] == [[None], [None, 4, 2]]
    found = [np.concatenate(parts) for parts in zip(*dataset, strict=True)]
    np.testing.assert_array_equal(found[0], np.arange(COUNT))
    np.testing.assert_array_equal(found[1], _images())


@pytest.mark.parametrize("dtype", ["bool", "f2", "f8", "u1", ">i4", ">f4", "c8"])
def test_types_are_kept_in_this_machine_s_byte_order(path, dtype):
    (found,) = build_pipeline(hdf5(path, f"types/{dtype}"), batch_size=COUNT, training=False)
    assert found.dtype == tf.as_dtype(np.dtype(dtype).newbyteorder("="))
    np.testing.assert_array_equal(found, np.arange(COUNT).astype(dtype))


def test_texts_of_both_kinds_are_read(path):
    source = hdf5(path, {"texts": "texts", "bytes": "bytes"})
    (found,) = build_pipeline(source, batch_size=COUNT, training=False)
    assert [text.decode() for text in found["texts"].numpy()] == [f"{number} ü" for number in range(COUNT)]
    assert found["bytes"].numpy().tolist() == [f"{number}".encode() for number in range(COUNT)]


def test_the_nesting_and_links_inside_the_file_are_followed(path):
    source = hdf5(str(path), ({"z": "numbers", "a": "link"}, "/deep/er/numbers"))
    ((first, second),) = build_pipeline(source, batch_size=COUNT, training=False)
    assert first["z"].numpy().tolist() == list(range(COUNT))
    assert first["a"].numpy().tolist() == second.numpy().tolist() == [10 * number for number in range(COUNT)]


def test_a_shuffle_mixes_blocks_and_a_seed_repeats_it(path, small_blocks):
    source = hdf5(path, ("numbers", "images"))

    def order(dataset):
        return [int(number) for number, _ in dataset]

    seeded = source.shuffled(3)
    first = order(seeded)
    assert sorted(first) == list(range(COUNT))
    assert order(seeded) == order(source.shuffled(3)) == first != order(source.shuffled(4))
    # One row of each of the 8 blocks in turn.
    assert len({number // 7 for number in first[:8]}) == 8
    free = source.shuffled(None)
    assert len({tuple(order(free)) for _ in range(4)}) > 1


@pytest.mark.parametrize("seed", [4, None])
def test_each_epoch_reads_blocks_in_another_order_which_is_found_again(path, small_blocks, monkeypatch, seed):
    monkeypatch.setattr(order_stages, "SHUFFLE_MIB", 0)  # so that the buffer hardly shuffles: it holds two rows

    def dataset():
        return build_pipeline(hdf5(path, ("numbers", "images")), batch_size=7, cache=None, remainder="keep", seed=seed)

    first, again = dataset(), dataset()
    epochs = [numbers_of(first) for _ in range(8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 8
    assert len({epoch[0] // 7 for epoch in epochs}) > 2
    place_of(again).move(replace(place_of(first).position, epoch=1, batch=2))
    assert [numbers_of(again), numbers_of(again)] == [epochs[1][14:], epochs[2]]


def test_blocks_are_whole_chunks_and_bounded_in_memory(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("small", (100_000, 1024), "u1", chunks=(100, 1024))
        file.create_dataset("large", (480, 2**20), "u1", chunks=(48, 2**20))
        file.create_dataset("text", (100_000,), h5py.string_dtype())

    def steps(name):
        return [int(first) for first, _ in hdf5(tmp_path / "data.h5", name).shuffled.args[0].take(2)]

    assert steps("small") == [0, 4100]  # 4 MiB are 4,096 rows: 41 chunks
    assert steps("large") == [0, 48]
    assert steps("text") == [0, 4096]
    assert hdf5(tmp_path / "data.h5", "small").shuffled.args[2] == 16
    assert hdf5(tmp_path / "data.h5", "large").shuffled.args[2] == 5  # 256 MiB


def test_the_file_is_not_held_open(path):
    dataset = iter(build_pipeline(hdf5(path, "numbers"), batch_size=8))
    next(dataset)
    with h5py.File(path, "a"):  # HDF5 locks what is open
        pass


def refused(path, name, message):
    with pytest.raises(PipelineError, match=message):
        hdf5(path, name)


@pytest.mark.parametrize("name", ["none", "numbers/none", "deep/none", "", "/"])
def test_missing_names_are_answered_with_those_there_are(path, name):
    expected = "Found a group" if name == "/" else "Found none"
    refused(
        path, name or "nothing/at/all", rf"(Found none\. There are|{expected}).*'bytes', 'deep/er/numbers', 'images'"
    )


def test_a_group_a_scalar_and_nothing_are_refused(add):
    def change(file):
        file["scalar"], file["empty"], file["no_rows"] = 3.0, h5py.Empty("f4"), np.zeros((0, 3))
        file["no_values"] = np.zeros((3, 0))

    path = add(change)
    refused(path, "deep", "'deep' .*Found a group. Name a dataset: .*'deep/er/numbers'")
    refused(path, "scalar", "Found a scalar")
    refused(path, "empty", "Found a scalar or an empty dataset")
    refused(path, "no_rows", "at least one example")
    refused(path, "no_values", r"'no_values' .* Found the shape \(3, 0\): no row holds a value\. Leave it out")
    refused(path, (), "at least one example")


@pytest.mark.parametrize("name", ["numbers\0more", "\udc80", "deep/er\0/numbers"])
def test_names_that_no_dataset_has_are_missing(path, name):
    refused(path, name, rf"Expected a dataset {re.escape(repr(name))} in .* Found none\. There are: 'bytes'")


def test_types_without_a_tensor_are_refused(add):
    types = {
        "compound": [("a", "i4")],
        "ragged": h5py.vlen_dtype(np.int32),
        "reference": h5py.ref_dtype,
        "opaque": "V5",
        "long": np.longdouble,
    }

    def change(file):
        for name, dtype in types.items():
            file.create_dataset(name, (3,), dtype)

    path = add(change)
    for name in types:
        refused(path, name, f"'{name}' in .* the type .*, which no tensor has")


def test_what_leads_out_of_the_file_is_refused(add, tmp_path):
    other = str(tmp_path / "other.h5")
    with h5py.File(other, "w") as file:
        file["x"] = np.arange(3)
    layout = h5py.VirtualLayout((3,), "i8")
    layout[:] = h5py.VirtualSource(other, "x", (3,))

    def change(file):
        file["out"], file["group_out"] = h5py.ExternalLink(other, "/x"), h5py.ExternalLink(other, "/")
        file["deep/out"] = h5py.SoftLink("/out")
        file.create_dataset("raw", (3,), "i4", external=[(other, 0, 12)])
        file.create_virtual_dataset("virtual", layout)

    path = add(change)
    for name in ("out", "deep/out", "group_out/x"):
        refused(path, name, f"in .* itself. Found a link to '{other}'. Pass that file, if you trust it")
    refused(path, "raw", "Found data in external files, which may be anywhere")
    refused(path, "virtual", "Found a virtual dataset, which may be anywhere")


def test_links_in_a_circle_or_to_nothing_are_refused(add):
    def change(file):
        file["one"], file["two"], file["dangling"] = (
            h5py.SoftLink("/two"),
            h5py.SoftLink("/one"),
            h5py.SoftLink("/none"),
        )

    path = add(change)
    for name in ("one", "dangling"):
        refused(path, name, "Expected a dataset .*Found none. There are: ")


@pytest.mark.parametrize("length", [0, 100, 3000, -1])
def test_a_cut_file_is_refused(path, length):
    os.truncate(path, length if length >= 0 else path.stat().st_size + length)
    refused(path, "numbers", "Expected a whole HDF5 file at .*HDF5 cannot open it")


def test_other_files_are_refused(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    refused(tmp_path / "array.npy", "x", "Expected a whole HDF5 file")
    refused(tmp_path / "none.h5", "x", r"There is no file '.*none\.h5'")
    refused(tmp_path, "x", "There is no file")
    with pytest.raises(TypeError, match=r"the path of a file\. Received: int\. Pass"):
        hdf5(3, "x")


def test_a_file_that_another_program_writes_is_refused(path):
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as HDF5 does
        refused(path, "numbers", "unable to lock file.*wait for the program that writes it")


def test_a_damaged_block_is_named(path, small_blocks):
    source = hdf5(path, ("numbers", "images"))
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(3)
    _overwrite(path, chunk.byte_offset, b"\0" * chunk.size)
    with pytest.raises(
        tf.errors.OpError, match=rf"PipelineError: Expected to read rows 21 to 27 of '{re.escape(str(path))}'"
    ):
        list(hdf5(path, ("numbers", "images")).dataset())
    with pytest.raises(PipelineError, match="rows 21 to 27"):
        plan_pipeline(hdf5(path, ("numbers", "images")), batch_size=2)
    with pytest.raises(tf.errors.OpError, match="It has changed since"):
        list(source.dataset())


def _overwrite(path, position, data):
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def test_a_file_that_changes_during_an_epoch_is_noticed(path, small_blocks):
    batches = iter(build_pipeline(hdf5(path, "images"), batch_size=2, training=False, prefetch=0))
    next(batches)
    os.utime(path, ns=(1, 1))
    with pytest.raises(tf.errors.OpError, match=r"It has changed since\. Make the source again"):
        list(batches)
    assert hdf5(path, "numbers").fingerprint() != hdf5(path, "deep/er/numbers").fingerprint()
