"""Files that users decode: contents, labels or names, and what is wrong with them."""

import os
import re

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, files, plan_pipeline

CONTENTS = [bytes([number, 0, 255]) * (number + 1) for number in range(6)]


@pytest.fixture
def paths(tmp_path):
    """Six files of different lengths."""
    for number, contents in enumerate(CONTENTS):
        (tmp_path / f"{number}.bin").write_bytes(contents)
    return [str(tmp_path / f"{number}.bin") for number in range(6)]


def read(source, **options):
    dataset = build_pipeline(source, **{"batch_size": 4, "training": False} | options)
    return [
        (contents, value.tolist() if hasattr(value, "tolist") else value)
        for batch, values in dataset.as_numpy_iterator()
        for contents, value in zip(batch, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("labels", "expected"),
    first_quick(
        [
            (None, [b"0.bin", b"1.bin", b"2.bin", b"3.bin", b"4.bin", b"5.bin"]),
            (np.arange(6) / 2, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]),
            (["b", "a"] * 3, [1, 0] * 3),
            ([["b", "a"], [], ["a"]] * 2, [[1, 1], [0, 0], [1, 0]] * 2),
        ]
    ),
)
def test_contents_with_labels_or_names(paths, labels, expected):
    assert read(files(paths, labels)) == list(zip(CONTENTS, expected, strict=True))
    shuffled = read(files(paths, labels), training=True, remainder="keep", seed=1)
    assert sorted(shuffled) == list(zip(CONTENTS, expected, strict=True)) != shuffled


def test_a_folder_of_classes(paths, tmp_path):
    folder = tmp_path / "train"
    for number, path in enumerate(paths):
        (folder / "ba"[number % 2]).mkdir(parents=True, exist_ok=True)
        os.rename(path, folder / "ba"[number % 2] / f"{number}.bin")
    (folder / "vocabulary.txt").write_text("beside the classes")
    source = files(folder)
    assert source.class_names == ("a", "b")
    assert read(source) == [(CONTENTS[number], int(number % 2 == 0)) for number in (1, 3, 5, 0, 2, 4)]
    assert read(files(folder, classes=["b", "a"])) == [(CONTENTS[number], number % 2) for number in (0, 2, 4, 1, 3, 5)]
    with pytest.raises(PipelineError, match=r"only the classes .*'a'.*Found the folder 'b'"):
        files(folder, classes=["a"])


def spoilt(paths, kind):
    """Makes one file of several bad; returns its path."""
    os.remove(paths[2])
    make = {"empty": lambda path: open(path, "w").close(), "a folder": os.mkdir, "a pipe": os.mkfifo}
    make.get(kind, lambda path: None)(paths[2])
    return paths[2]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", first_quick(["empty", "missing", "a folder", "a pipe"]))
def test_bad_files_are_named_or_left_out(paths, kind):
    dataset = build_pipeline(files(paths), batch_size=2, training=False, cache=None)
    bad = spoilt(paths, kind)
    told = "No such file" if kind == "missing" else kind
    with pytest.raises(PipelineError, match=rf"Found 1 that are missing(.|\n)*{re.escape(bad)}.*{told}"):
        plan_pipeline(files(paths), batch_size=2)
    with pytest.warns(UserWarning, match=rf"1 of 6 files that are missing(.|\n)*{re.escape(bad)}"):
        plan = plan_pipeline(files(paths, range(6)), batch_size=2, training=False, on_bad_file="skip")
    assert "5 examples; without 1 of 6 files that are missing, empty or unreadable" in unwrapped(plan)
    assert [int(label) for _, labels in plan.build() for label in labels] == [0, 1, 3, 4, 5]
    if kind != "a pipe":  # for which reading waits
        with pytest.raises(tf.errors.OpError, match=re.escape(bad)):  # it went bad after the plan
            list(dataset)


@pytest.mark.parametrize(
    ("paths", "options", "error", "text"),
    [
        ("a.wav", {}, PipelineError, r"one subfolder per class\. There is no folder '.*a.wav'"),
        ("a.wav", {"labels": [1]}, TypeError, "paths in a sequence. Received: 'a.wav'. Pass a list"),
        ([b"a.wav"], {}, TypeError, "Received as one: b'a.wav'"),
        (["gs://bucket/a.wav"], {}, PipelineError, r"a path on this machine.*'gs://bucket/a.wav'.*fetch"),
        (["a.wav"], {"classes": ["a"]}, TypeError, "`classes` only with labels"),
    ],
)
def test_wrong_arguments_are_refused(paths, options, error, text):
    with pytest.raises(error, match=text):
        files(paths, **options)
