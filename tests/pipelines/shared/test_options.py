import functools
import inspect
import pathlib
import re
import typing

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import build_pipeline, per_batch, plan_pipeline
from tfopt.pipelines.shared.options import Choices, PipelineOptions, function_name

HOME = "/somewhere"


@pytest.mark.parametrize(
    ("given", "name", "kept"),
    [
        ({}, "shuffle", True),
        ({"training": False}, "shuffle", False),
        ({"training": False, "shuffle": True}, "shuffle", True),
        ({"shuffle": False}, "shuffle", False),
        ({"batch_size": np.int64(8)}, "batch_size", 8),
        ({"seed": np.uint8(3)}, "seed", 3),
        ({"prefetch": np.int32(2)}, "prefetch", 2),
        ({"prefetch": tf.data.AUTOTUNE}, "prefetch", "auto"),
        ({"cache": "./here"}, "cache_folder", str(pathlib.Path.cwd() / "here")),
        ({"cache": pathlib.Path("here")}, "cache_folder", str(pathlib.Path.cwd() / "here")),
        ({"cache": "~/here"}, "cache_folder", f"{HOME}/here"),
        *(({"cache": name}, "cache_folder", None) for name in ("auto", "memory", "device", None)),
    ],
)
def test_what_is_kept_of_an_option(given, name, kept, monkeypatch):
    monkeypatch.setenv("HOME", HOME)
    found = getattr(PipelineOptions(**given), name)
    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cache", "memroy", """Expected "auto", "memory", "device", the path of a folder or None (without quotes)"""),
        ("cache", "photos", "For a folder of that name pass './photos'."),
        ("cache", "gs://bucket/cache", "the path of a local folder for `cache`. Received: 'gs://bucket/cache'"),
        ("cache", "./caf\udce9", "the path of a local folder"),
        ("cache", "", "the path of a local folder"),
        ("cache_after", "augment", "`cache_after`: 'auto', 'decode' or 'transform'. Received: 'augment'"),
        ("cache_limit_gib", 10**400, "cache_limit_gib"),
        ("cache_limit_gib", 0, "cache_limit_gib to be above 0. Received: 0"),
        ("augment", [per_batch(function_name), print], "print after per_batch(function_name). Move it forward"),
        ("remainder", "dorp", "`remainder`: 'drop', 'keep' or 'pad'. Received: 'dorp'. Did you mean 'drop'"),
        ("batch_size", 0, "batch_size to be at least 1. Received: 0"),
        ("seed", -1, "seed to be at least 0. Received: -1"),
        ("prefetch", "Auto", "`prefetch`: 'auto'. Received: 'Auto'"),
        ("prefetch", -2, "prefetch to be at least 0. Received: -2"),
    ],
)
def test_unknown_values_are_refused(name, value, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        PipelineOptions(**{name: value})


WRONG = {
    **{"batch_size": [2.0, True], "training": [1], "shuffle": ["yes"], "crop": [224], "transform": [3]},
    **{"augment": ["flip", [tf.identity, 3], [None]], "cache": [True], "cache_key": [3], "cache_limit_gib": ["10"]},
    **{"seed": [1.5], "remainder": [3], "prefetch": [None, 1.0], "device": [0]},
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_types_are_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"\b{name}\b.*\. Received: .*\. Pass "):
        PipelineOptions(**{name: value})


def test_functions_have_names():
    for named in (function_name, functools.partial(function_name)):
        assert function_name(named) == "function_name"
    assert function_name(iter([])) == "list_iterator"


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
def test_the_signature_shows_the_options_and_labels_belong_in_a_tuple(make):
    shown = inspect.signature(make).parameters
    assert list(shown) == ["source", *Choices.__annotations__]
    assert (shown["batch_size"].default, shown["cache"].default) == (256, "auto")
    with pytest.raises(TypeError, match=rf"Found 2 arguments without a name.*one tuple: {make.__name__}\(\(x, y\)"):
        make(np.zeros(8), np.zeros(8), batch_size=2)
    assert make(source=np.zeros(8), batch_size=2) is not None


def test_the_types_for_editors_are_those_of_the_options():
    assert typing.get_type_hints(Choices) == typing.get_type_hints(PipelineOptions)
