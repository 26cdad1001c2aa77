import functools
import inspect
import pathlib
import typing

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import build_pipeline, per_batch, plan_pipeline
from tfopt.pipelines.shared.options import Choices, PipelineOptions, choose_remainder, function_name


def test_training_sets_the_shuffle():
    assert (PipelineOptions().shuffle, PipelineOptions(training=False).shuffle) == (True, False)
    assert PipelineOptions(training=False, shuffle=True).shuffle is True
    assert PipelineOptions(shuffle=False).shuffle is False


@pytest.mark.parametrize(
    ("given", "count", "left_out", "mixed", "expected", "why"),
    [
        ({}, 100, 5, True, "drop", "leaves out others"),
        ({}, 100, 6, True, "keep", "to drop 6 of 100 would be more than 5 % of each epoch"),
        ({}, 100, 100, True, "keep", "to drop 100 of 100"),
        ({}, 100, 5, False, "keep", "the shuffle's buffer does not hold them all"),
        ({}, 100, 0, False, "drop", ""),
        ({}, None, None, False, "keep", "their number is unknown"),
        ({}, None, 0, False, "drop", ""),  # endless
        ({"shuffle": False}, 100, 5, False, "keep", "shuffle=False"),
        ({"training": False}, 100, 5, False, "keep", "training=False"),
        ({"training": False, "shuffle": True}, 100, 5, True, "keep", "training=False"),
        ({"remainder": "drop", "shuffle": False}, 100, 99, False, "drop", "remainder='drop'"),
        ({"remainder": "pad"}, 100, 5, True, "pad", "remainder='pad'"),
        ({"remainder": "keep"}, 100, 0, True, "keep", "remainder='keep'"),
    ],
)
def test_what_becomes_of_the_last_batch(given, count, left_out, mixed, expected, why):
    remainder, reason = choose_remainder(PipelineOptions(**given), count, left_out, mixed=mixed)
    assert remainder == expected
    assert why in reason


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"cache": "memroy"},
            """Expected "auto", "memory", "device", the path of a folder or None (without quotes) for `cache`. Rec""",
        ),
        ({"cache": "photos"}, "For a folder of that name pass './photos'."),
        ({"cache_after": "augment"}, "`cache_after`: 'auto', 'decode' or 'transform'. Received: 'augment'"),
        ({"cache": "gs://bucket/cache"}, "the path of a local folder for `cache`. Received: 'gs://bucket/cache'"),
        ({"cache": "./caf\udce9"}, "the path of a local folder"),
        ({"cache": ""}, "the path of a local folder"),
        ({"cache_limit_gib": 10**400}, "cache_limit_gib"),
        ({"cache_limit_gib": 0}, "cache_limit_gib to be above 0. Received: 0"),
        ({"augment": [per_batch(function_name), print]}, "print after per_batch(function_name). Move it forward"),
        ({"cache": "None"}, "None (without quotes)"),
        ({"remainder": "dorp"}, "`remainder`: 'drop', 'keep' or 'pad'. Received: 'dorp'. Did you mean 'drop'"),
        ({"prefetch": "Auto"}, "`prefetch`: 'auto'. Received: 'Auto'"),
        ({"batch_size": 0}, "batch_size to be at least 1. Received: 0"),
        ({"seed": -1}, "seed to be at least 0. Received: -1"),
        ({"prefetch": -2}, "prefetch to be at least 0. Received: -2"),
    ],
)
def test_unknown_values_are_refused(arguments, text):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        PipelineOptions(**arguments)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 2.0},
        {"batch_size": True},
        {"training": 1},
        {"shuffle": "yes"},
        {"transform": 3},
        {"augment": "flip"},
        {"augment": [tf.identity, 3]},
        {"augment": [None]},
        {"crop": 224},
        {"cache": True},
        {"cache_key": 3},
        {"cache_limit_gib": "10"},
        {"device": 0},
        {"seed": 1.5},
        {"remainder": 3},
        {"prefetch": None},
        {"prefetch": 1.0},
    ],
)
def test_wrong_types_are_refused_by_name(arguments):
    with pytest.raises(TypeError, match=rf"\b{next(iter(arguments))}\b.*\. Received: .*\. Pass "):
        PipelineOptions(**arguments)


def test_a_folder_for_the_cache_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    assert PipelineOptions(cache="./here").cache_folder == str(tmp_path / "here")
    assert PipelineOptions(cache=pathlib.Path("here")).cache_folder == str(tmp_path / "here")
    assert PipelineOptions(cache="~/here").cache_folder == "/somewhere/here"
    assert [PipelineOptions(cache=name).cache_folder for name in ("auto", "memory", "device", None)] == [None] * 4


def test_functions_have_names():
    class Layer:
        def __call__(self, example):
            return example

    assert function_name(function_name) == "function_name"
    assert function_name(functools.partial(function_name)) == "function_name"
    assert function_name(Layer()).endswith("Layer")


def test_whole_numbers_of_numpy_are_taken_as_ints():
    options = PipelineOptions(batch_size=np.int64(8), seed=np.uint8(3), prefetch=np.int32(2))
    found = (options.batch_size, options.seed, options.prefetch)
    assert found == (8, 3, 2)
    assert all(type(value) is int for value in found)
    assert PipelineOptions(prefetch=tf.data.AUTOTUNE).prefetch == "auto"


@pytest.mark.parametrize("make", [plan_pipeline, build_pipeline])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("drop_remainder", r'Did you mean remainder="drop" or remainder="keep"\?'),
        ("shuffel", r"Did you mean shuffle\?"),
        ("batchsize", r"Did you mean batch_size\?"),
        ("xyz", r"Leave it out\."),
    ],
)
def test_unknown_options_are_answered_with_the_nearest(make, name, hint):
    with pytest.raises(TypeError, match=f"among batch_size, .*, device, on_bad_file. Found '{name}'. {hint}"):
        make(np.zeros(8), **{name: True})


@pytest.mark.parametrize("make", [plan_pipeline, build_pipeline])
def test_labels_behind_the_examples_are_asked_for_as_a_tuple(make):
    text = rf"Found 2 arguments without a name.*one tuple: {make.__name__}\(\(x, y\)"
    with pytest.raises(TypeError, match=text):
        make(np.zeros(8), np.zeros(8), batch_size=2)
    assert make(source=np.zeros(8), batch_size=2) is not None


@pytest.mark.parametrize("make", [plan_pipeline, build_pipeline])
def test_the_signature_shows_the_options_and_their_defaults(make):
    shown = inspect.signature(make).parameters
    assert list(shown) == ["source", *Choices.__annotations__]
    assert (shown["batch_size"].default, shown["cache"].default) == (256, "auto")


def test_the_types_for_editors_are_those_of_the_options():
    assert typing.get_type_hints(Choices) == typing.get_type_hints(PipelineOptions)
