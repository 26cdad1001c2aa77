import os
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets
from python_child import run_python

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.sources.image_files import decode_image
from tfopt.pipelines.sources.tfds import tfds


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prepare_tfds):
    place = tmp_path_factory.mktemp("tfds")
    prepare_tfds(place)
    prepare_tfds(place, "features", supervised=False)
    return place


def shades(dataset):
    return [int(shade) for images, _ in dataset for shade in images[:, 0, 0, 0]]


def test_every_example_with_its_label(folder):
    dataset = build_pipeline(tfds("shades", data_dir=folder), batch_size=7, training=False)
    assert dataset.element_spec[0].shape.as_list() == [None, 4, 5, 3]
    assert dataset.element_spec[0].dtype == tf.uint8
    pairs = [
        pair for images, labels in dataset for pair in zip(images[:, 3, 4, 2].numpy(), labels.numpy(), strict=True)
    ]
    assert sorted(pairs) == [(number, number % 2) for number in range(30)]


def test_the_order_without_a_shuffle_is_that_of_tensorflow_datasets(folder):
    builder = tensorflow_datasets.builder_from_directory(str(folder / "shades" / "1.0.0"))
    expected = [int(example["number"]) for example in builder.as_dataset(split="train")]
    source = tfds("shades", data_dir=folder)
    assert shades(build_pipeline(source, batch_size=7, training=False)) == expected


@pytest.mark.slow
def test_each_example_is_in_one_of_the_parts_of_several_processes(folder):
    source = tfds("shades", "train[:40%]+test", data_dir=folder)
    parts = [source.part(index, 4) for index in range(4)]
    found = [shades(build_pipeline(part, batch_size=5, training=False)) for part in parts]
    assert [part.count for part in parts] == [len(each) for each in found]
    assert max(map(len, found)) <= min(map(len, found)) + 1
    whole = shades(build_pipeline(source, batch_size=5, training=False))
    assert len(whole) == source.count
    assert sorted(shade for each in found for shade in each) == sorted(whole)


@pytest.mark.parametrize("split", ["train", "train[:50%]"])
def test_a_tf_data_service_is_refused(folder, split):
    with pytest.raises(ValueError, match=r"Found: assert_cardinality in tfds .* such as write_records makes"):
        plan_pipeline(tfds("shades", split, data_dir=folder), batch_size=5, service="grpc://127.0.0.1:9")


@pytest.mark.parametrize(
    ("split", "count"), [("test", 10), ("train[:50%]", 15), ("train[10:20]", 10), ("train+test", 40)]
)
def test_splits(folder, split, count):
    source = tfds("shades", split, data_dir=folder)
    assert source.count == count
    assert len(set(shades(build_pipeline(source, batch_size=4, training=False)))) == count


def test_without_a_label_examples_are_dicts(folder):
    source = tfds("features", data_dir=folder)
    examples = next(iter(build_pipeline(source, batch_size=30, training=False)))
    assert sorted(examples) == ["image", "label", "number"]
    np.testing.assert_array_equal(examples["image"][:, 3, 4, 2], examples["number"])
    assert source.encoded is None


def test_classes_are_known(folder):
    assert tfds("shades", data_dir=folder).class_names == ("even", "odd")
    assert tfds("features", data_dir=folder).class_names == ("even", "odd")


def test_images_can_be_had_encoded(folder):
    source = tfds("shades", data_dir=folder)
    for raw in source.dataset().take(3):
        contents, label = source.encoded(*raw)
        image, same_label = source.decode(*raw)
        np.testing.assert_array_equal(decode_image(contents), image)
        assert contents.dtype == tf.string
        assert int(label) == int(same_label)


def test_a_builder_is_taken(folder):
    builder = tensorflow_datasets.builder_from_directory(str(folder / "shades" / "1.0.0"))
    assert tfds(builder, "test").count == 10
    with pytest.raises(ValueError, match="A builder knows its own: leave `data_dir` out"):
        tfds(builder, data_dir=folder)


def test_a_builder_that_is_not_prepared_is_refused(tmp_path):
    builder = tensorflow_datasets.builder("mnist", data_dir=str(tmp_path))
    with pytest.raises(PipelineError, match=r"Found none in '.*mnist/3\.0\.1'\. Call download_and_prepare\(\)"):
        tfds(builder)


# The library itself would ask the network for minutes.
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("mnist", r"Prepare it once, with network access: tensorflow_datasets\.load\('mnist', data_dir="),
        ("glue/cola", r"tensorflow_datasets\.load\('glue/cola'"),
        ("mnits", r"Did you mean 'mnist'\? Or prepare it once"),
        ("shade", r"Did you mean 'shades'\?"),
        ("nothing_near_this", r"Check the name\. Or prepare it once"),
        ("shades:9.9.9", r"There are: 'shades:1\.0\.0'"),
        ("shades/config", r"There are: 'shades:1\.0\.0'"),
    ],
)
def test_what_is_not_prepared_is_answered_without_a_network(folder, name, remedy):
    with pytest.raises(PipelineError, match=f"Expected the prepared dataset '{re.escape(name)}'.*{remedy}"):
        tfds(name, data_dir=folder)


@pytest.mark.slow
def test_the_library_is_imported_when_needed_and_knows_its_own_folder(folder):
    script = (
        "import sys\n"
        "from tfopt.pipelines.as_source import as_source\n"
        "print('tensorflow_datasets' in sys.modules)\n"
        "print(as_source('tfds:shades').count)\n"
    )
    assert run_python(script, TFDS_DATA_DIR=str(folder)).split() == ["False", "30"]


def test_an_import_that_failed_in_part_is_named(folder, monkeypatch):
    monkeypatch.delattr(tensorflow_datasets, "core")
    with pytest.raises(
        UnsupportedError, match=r"needs an older tensorflow-metadata.*pip install 'tensorflow-metadata<1"
    ):
        tfds("shades", data_dir=folder)


@pytest.mark.parametrize("name", ["", "a b", "huggingface:imdb", "../mnist", "mnist/a/b", "mnist:9", "mnist:3.0"])
def test_names_of_another_form_are_refused(folder, name):
    with pytest.raises(ValueError, match=r"Expected a dataset's name.*Received: "):
        tfds(name, data_dir=folder)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"a name or a tfds\.core\.DatasetBuilder\. Received: int"):
        tfds(3)


@pytest.mark.parametrize("split", ["validation", "train[", "", "train[:200%]"])
def test_unknown_splits_are_answered_with_those_there_are(folder, split):
    with pytest.raises(PipelineError, match=rf"has \['train', 'test'\]\. Received '{re.escape(split)}'"):
        tfds("shades", split, data_dir=folder)


def test_an_empty_part_is_refused(folder):
    with pytest.raises(PipelineError, match=r"at least one example in shades/1\.0\.0 \[train\[5:3\]\]"):
        tfds("shades", "train[5:3]", data_dir=folder)


def test_missing_and_damaged_files_are_found(tmp_path, prepare_tfds):
    prepare_tfds(tmp_path)
    file = sorted((tmp_path / "shades" / "1.0.0").glob("*train*"))[1]
    contents = file.read_bytes()
    file.write_bytes(contents[: len(contents) // 2])
    with pytest.raises((PipelineError, tf.errors.DataLossError), match="truncated record"):
        list(build_pipeline(tfds("shades", data_dir=tmp_path), batch_size=5))
    file.write_bytes(b"")
    with pytest.raises((PipelineError, tf.errors.FailedPreconditionError), match="expected to contain 30 elements"):
        list(build_pipeline(tfds("shades", data_dir=tmp_path), batch_size=5))
    file.unlink()
    with pytest.raises(PipelineError, match=rf"Missing: '{re.escape(str(file))}' \(1 in all\)"):
        tfds("shades", data_dir=tmp_path)


def test_the_fingerprint_follows_the_files_and_the_split(tmp_path, prepare_tfds):
    prepare_tfds(tmp_path)
    source = tfds("shades", data_dir=tmp_path)
    before = source.fingerprint()
    assert tfds("shades", data_dir=tmp_path).fingerprint() == before
    one, two = (tfds("shades", f"train[:{count}]", data_dir=tmp_path).fingerprint() for count in (1, 2))
    assert one != two
    file = next((tmp_path / "shades" / "1.0.0").glob("*train*"))
    os.utime(file, ns=(1, 1))
    assert source.fingerprint() != before
