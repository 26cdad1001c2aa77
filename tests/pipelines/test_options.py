import functools

import pytest

from tfopt.pipelines.options import PipelineOptions, function_name


def test_training_sets_shuffle_and_remainder():
    fitting, evaluating = PipelineOptions.fill_in(), PipelineOptions.fill_in(training=False)
    assert (fitting.shuffle, fitting.remainder) == (True, "drop")
    assert (evaluating.shuffle, evaluating.remainder) == (False, "keep")
    asked = PipelineOptions.fill_in(training=False, shuffle=True, remainder="drop")
    assert (asked.shuffle, asked.remainder) == (True, "drop")
    assert PipelineOptions.fill_in(shuffle=False).shuffle is False


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cache": "memroy"}, "`cache`: 'auto', 'memory' or 'None'. Received: 'memroy'. Did you mean 'memory'"),
        ({"remainder": "dorp"}, "`remainder`: 'drop' or 'keep'. Received: 'dorp'. Did you mean 'drop'"),
        ({"prefetch": "Auto"}, "`prefetch`: 'auto'. Received: 'Auto'"),
        ({"batch_size": 0}, "`batch_size` to be at least 1. Received: 0"),
        ({"seed": -1}, "`seed` to be at least 0. Received: -1"),
        ({"prefetch": -1}, "`prefetch` to be at least 0. Received: -1"),
    ],
)
def test_unknown_values_are_refused(arguments, text):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        PipelineOptions.fill_in(**arguments)
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
        {"cache": True},
        {"seed": 1.5},
        {"remainder": 3},
        {"prefetch": None},
        {"prefetch": 1.0},
    ],
)
def test_wrong_types_are_refused_by_name(arguments):
    with pytest.raises(TypeError, match=f"`{next(iter(arguments))}`. Received: "):
        PipelineOptions.fill_in(**arguments)


def test_functions_have_names():
    class Layer:
        def __call__(self, example):
            return example

    assert function_name(function_name) == "function_name"
    assert function_name(functools.partial(function_name)) == "function_name"
    assert function_name(Layer()).endswith("Layer")
