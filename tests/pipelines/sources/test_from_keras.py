"""docs/from-keras.md: what stands in place of Keras' own code makes the same examples, and a model trains on them."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from snippets import run_snippets, snippets_of, text_of

PAGE = "from-keras.md"
ROWS = re.findall(r"^\| `(\w+=\S+)` \| `(.+?)`", text_of(PAGE), re.M)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the page's scripts read."""
    draws = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "reviews" / name).mkdir(parents=True)
        for number in range(32):
            keras.utils.save_img(
                tmp_path / "photos" / name / f"{number}.jpg", draws.integers(256, size=(50 + number, 70, 3))
            )
            (tmp_path / "reviews" / name / f"{number}.txt").write_text(f"a text of {name}, the {number}th\nof all")
    ages = "".join(f"{number % 50}.5,{'ab'[number % 2]},{number % 3 % 2}\n" for number in range(64))
    (tmp_path / "patients.csv").write_text(f"age,word,target\n{ages}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examples(dataset):
    """The examples of an epoch, each as the bytes of its parts with their dtypes, sorted."""
    batches = dataset if isinstance(dataset, tf.data.Dataset) else map(dataset.__getitem__, range(len(dataset)))
    found = []
    for batch in batches:
        parts = [np.asarray(part) for part in tf.nest.flatten(batch)]
        found += [
            [(row.dtype.kind, row.tobytes()) for row in map(np.asarray, rows)] for rows in zip(*parts, strict=True)
        ]
    return sorted(found)


@pytest.mark.slow
def test_each_pair_makes_the_same_examples(folder):
    names, before, pairs = {}, None, 0
    for snippet in snippets_of(PAGE):
        names.pop("dataset", None)
        exec(compile(snippet, PAGE, "exec"), names)
        if "dataset" not in names:
            continue
        if before is None:
            before = examples(names["dataset"])
        else:
            assert examples(names["dataset"]) == before, snippet
            before, pairs = None, pairs + 1
    assert pairs == 6


@pytest.mark.parametrize(("argument", "returned"), ROWS, ids=[argument for argument, _ in ROWS])
def test_arguments_of_image_dataset_from_directory(folder, argument, returned):
    names = {}
    imports, keras_own, ours = snippets_of(PAGE)[:3]
    own = keras_own.replace("batch_size", f"{argument}, batch_size")
    instead = ours.replace("tf.image.resize(image, (64, 64)), label", returned)
    assert own != keras_own
    assert instead != ours
    exec(compile(imports + own, PAGE, "exec"), names)
    expected = examples(names["dataset"])
    exec(compile(instead, PAGE, "exec"), names)
    assert examples(names["dataset"]) == expected


@pytest.mark.slow
def test_the_snippets_of_from_keras_run(folder):
    run_snippets("from-keras.md", folder)
