"""What stands for which source; test_dataset.py has those for data in memory, images and TFRecords."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline
from tfopt.pipelines.as_source import as_source
from tfopt.pipelines.sources import tfds as module
from tfopt.pipelines.write import write_records


@pytest.fixture
def npy_paths(tmp_path):
    paths = str(tmp_path / "x.npy"), str(tmp_path / "y.npy")
    np.save(paths[0], np.arange(6))
    np.save(paths[1], np.arange(6) * 2)
    return paths


@pytest.mark.parametrize("wrap", [lambda x, y: (x, y), lambda x, y: {"x": Path(x), "y": (y,)}, lambda x, y: x])
def test_paths_of_npy_files_in_any_nesting(npy_paths, wrap):
    (found,) = build_pipeline(wrap(*npy_paths), batch_size=6, training=False)
    expected = wrap("x", "y")
    if isinstance(expected, tuple):
        assert [part.numpy().tolist() for part in found] == [[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]]
    elif isinstance(expected, dict):
        assert found["y"][0].numpy().tolist() == [0, 2, 4, 6, 8, 10]
    else:
        assert found.numpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_npy_files_in_a_list_are_refused_with_the_way_out(npy_paths):
    with pytest.raises(TypeError, match=r"npy\(\) expects paths in tuples and dicts.*: list.*\(images, labels\)"):
        as_source(list(npy_paths))


def test_arrays_of_texts_are_arrays(tmp_path):
    assert as_source(np.array(["a.npy", "b.npy"])).name == "arrays"
    assert as_source({"x": np.zeros(3)}).name == "arrays"


def test_ragged_integers_are_documents_and_others_are_arrays():
    assert as_source(tf.ragged.constant([[1, 2], [3]])).name == "tokens"
    signals = tf.ragged.constant([[1.5, 2.5], [3.5]])
    (found,) = build_pipeline(signals, batch_size=2, training=False, pad="batch")
    assert found.numpy().tolist() == [[1.5, 2.5], [3.5, 0.0]]


@pytest.mark.parametrize("ending", [".h5", ".hdf5"])
def test_an_hdf5_file_of_one_dataset(tmp_path, ending):
    path = tmp_path / f"data{ending}"
    with h5py.File(path, "w") as file:
        file["group/x"] = np.arange(6)
    (found,) = build_pipeline(str(path), batch_size=6, training=False)
    assert found.numpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_an_hdf5_file_of_several_asks_which(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["group/y"] = np.arange(6), np.arange(6)
    expected = r"'group/y', 'x'\. Name those that make up an example, such as hdf5\(path, "
    with pytest.raises(PipelineError, match=expected):
        as_source(tmp_path / "data.h5")
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    with pytest.raises(PipelineError, match=r"holds one dataset\. Found in '.*empty\.h5': none"):
        as_source(tmp_path / "empty.h5")


@pytest.fixture
def prepared(tmp_path, monkeypatch, prepare_tfds):
    """A prepared data set in the default folder; returns its builder."""
    builder = prepare_tfds(tmp_path)
    monkeypatch.setattr(tensorflow_datasets.core.utils.file_utils.constants, "DATA_DIR", str(tmp_path))
    return builder


@pytest.mark.parametrize(
    ("text", "split", "count"),
    [
        ("tfds:shades", "train", 30),
        ("tfds:shades:1.0.0", "train", 30),
        ("tfds:shades[test]", "test", 10),
        ("tfds:shades[train[:50%]]", "train[:50%]", 15),
        ("tfds:shades[train[:10]+test]", "train[:10]+test", 20),
    ],
)
def test_a_name_of_tensorflow_datasets(prepared, text, split, count):
    source = as_source(text)
    assert source.name == f"tfds shades/1.0.0 [{split}]"
    assert source.count == count


def test_a_builder_of_tensorflow_datasets(prepared):
    assert as_source(prepared).count == 30


def test_a_name_that_is_not_prepared(prepared):
    with pytest.raises(PipelineError, match="Did you mean 'shades'"):
        as_source("tfds:shade")


def test_a_folder_of_records_is_told_from_one_of_images(photos, tmp_path):
    write_records(np.arange(6), tmp_path / "shards")
    assert as_source(photos).name == f"images in {photos}"
    assert as_source(tmp_path / "shards").name == "records in 1 file"


@pytest.mark.slow
def test_what_lies_in_files_can_be_cached_on_disk(npy_paths, prepared, tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(6)
    for number, given in enumerate((npy_paths[0], prepared, tmp_path / "data.h5")):
        folder = tmp_path / f"cache{number}"
        first, *others = (build_pipeline(given, batch_size=2, training=False, cache=folder) for _ in range(2))
        epochs = [[tf.nest.flatten(batch)[0].numpy().tolist() for batch in dataset] for dataset in (first, *others)]
        assert epochs[0] == epochs[1]
        assert list(folder.rglob("*"))


def test_a_missing_npy_or_hdf5_file(tmp_path):
    for name in ("x.npy", "x.h5"):
        with pytest.raises(PipelineError, match=re.escape(str(tmp_path / name))):
            as_source(tmp_path / name)


def test_what_is_no_builder():
    assert not module.is_builder(np.zeros(3))
    assert not module.is_builder("mnist")


def rows():
    yield np.zeros(3)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ([np.zeros((4, 2)), np.zeros(4)], r"pass a tuple \(x, y\)"),
        (rows(), r"pass the function that makes it"),
        ({1, 2}, r"pass loader\(it\)"),
        ([1.0, 2.0], r"a list of numbers with np\.asarray"),
    ],
    ids=["list of arrays", "generator", "iterable", "list of numbers"],
)
def test_what_is_no_source_names_what_to_pass(given, remedy):
    with pytest.raises(TypeError, match=remedy):
        as_source(given)
