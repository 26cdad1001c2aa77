"""What stands for which source, and what is answered to anything else."""

import re
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets

from tfopt.errors import PipelineError
from tfopt.pipelines import arrays, build_pipeline, write_records
from tfopt.pipelines.as_source import as_source, dataset
from tfopt.pipelines.sources.tfds import is_builder


@pytest.fixture
def folder(tmp_path, monkeypatch, photos, record_files, prepare_tfds):
    """A working directory with something of each kind: photos, part-0.tfrecord and its like, and those below."""
    record_files(2)
    write_records(np.arange(6), tmp_path / "shards")
    np.save(tmp_path / "x.npy", np.arange(6))
    np.save(tmp_path / "y.npy", np.arange(6) * 2)
    for name, datasets in {"one": ["group/x"], "both": ["x", "group/y"], "none": []}.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for each in datasets:
                file[each] = np.arange(6)
    (tmp_path / "one.hdf5").write_bytes((tmp_path / "one.h5").read_bytes())
    with tarfile.open(tmp_path / "one.tar", "w") as archive:
        archive.add(tmp_path / "x.npy", "0001.npy")
    builder = prepare_tfds(tmp_path / "tfds")
    monkeypatch.setattr(tensorflow_datasets.core.utils.file_utils.constants, "DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.chdir(tmp_path)
    return builder


def test_each_kind_of_data_stands_for_its_source(folder):
    parts = ["part-0.tfrecord", "part-1.tfrecord"]
    kinds = {
        "arrays": [
            *(np.zeros(3), tf.zeros(3), (np.zeros(3), np.zeros(3)), {"x": np.zeros(3)}, np.array(["a.npy", "b.npy"])),
            tf.ragged.constant([[1.5, 2.5], [3.5]]),
        ],
        "tokens": [tf.ragged.constant([[1, 2], [3]]), [[1, 2], [3]]],
        "dataset": [tf.data.Dataset.range(3)],
        "images in photos": ["photos", Path("photos")],
        "records in 2 files": [parts, tuple(parts), "part-*.tfrecord"],
        "records in 1 file": [parts[0], "shards"],
        "examples in 1 tar file": ["one.tar", Path("one.tar"), ["one.tar"], "*.tar"],
        f"npy {Path('x.npy').absolute()}": ["x.npy", Path("x.npy")],
        f"hdf5 {Path('one.h5').absolute()}": ["one.h5"],
        f"hdf5 {Path('one.hdf5').absolute()}": [Path("one.hdf5")],
        "tfds shades/1.0.0 [train]": ["tfds:shades", "tfds:shades:1.0.0", folder],
        "tfds shades/1.0.0 [test]": ["tfds:shades[test]"],
        "tfds shades/1.0.0 [train[:50%]]": ["tfds:shades[train[:50%]]"],
        "tfds shades/1.0.0 [train[:10]+test]": ["tfds:shades[train[:10]+test]"],
    }
    for name, given in kinds.items():
        assert {as_source(each).name for each in given} == {name}
    assert as_source("tfds:shades[train[:10]+test]").count == 20
    source = arrays(np.zeros(3))
    assert as_source(source) is source
    assert not is_builder("mnist")


@pytest.mark.parametrize(
    "given", [("x.npy", "y.npy"), {"x": Path("x.npy"), "y": ("y.npy",)}, "x.npy", "one.h5"], ids=str
)
def test_paths_in_any_nesting_are_read(folder, given):
    (found,) = build_pipeline(given, batch_size=6, training=False).as_numpy_iterator()
    expected = tf.nest.map_structure(lambda path: np.arange(6) * (1 + str(path).startswith("y")), given)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def rows():
    yield np.zeros(3)


@pytest.mark.parametrize(
    ("given", "error", "remedy"),
    [
        ([np.zeros((4, 2)), np.zeros(4)], TypeError, r"Received: list.*pass a tuple \(x, y\)"),
        (rows(), TypeError, r"Received: generator.*pass the function that makes it"),
        ({1, 2}, TypeError, r"Received: set.*pass loader\(it\)"),
        ([1.0, 2.0], TypeError, r"a list of numbers with np\.asarray"),
        *((given, TypeError, f"Received: {type(given).__name__}") for given in (None, 3, [])),
        (["x.npy", "y.npy"], TypeError, r"npy\(\) expects paths in tuples and dicts.*: list.*\(images, labels\)"),
        ("tfds:shade", PipelineError, "Did you mean 'shades'"),
        ("photso", PipelineError, r"a folder of images or TFRecord files\. Nothing is at 'photso'\..*'photos'\?"),
        ("unlike", PipelineError, r"Nothing is at 'unlike'\. Check the path\."),
        ("no*.tfrecord", PipelineError, "Nothing matches"),
        ("no.npy", PipelineError, r"no\.npy'"),
        ("no.h5", PipelineError, r"no\.h5'"),
        ("both.h5", PipelineError, r"'group/y', 'x'\. Name those that make up an example, such as hdf5\(path, "),
        ("none.h5", PipelineError, r"holds one dataset\. Found in '.*none\.h5': none"),
    ],
)
def test_what_is_no_source_names_what_to_pass(folder, given, error, remedy):
    with pytest.raises(error, match=remedy):
        as_source(given)


def test_all_that_is_accepted_is_named():
    accepted = r"tfopt\.pipelines\.Source.*arrays.*tf\.data\.Dataset.*folder of images.*TFRecord"
    with pytest.raises(TypeError, match=rf"{accepted}.*Received: int"):
        as_source(3)
    with pytest.raises(TypeError, match=re.escape("expects a tf.data.Dataset. Received: int")):
        dataset(3)
