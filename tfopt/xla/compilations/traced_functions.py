"""Finds the Python function behind a traced one: its arguments, and the Keras model whose step it is."""

import gc
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.internals.graphs import Function, paths_and_leaves

_STEPS = {"train_step": "training step", "test_step": "evaluation step", "predict_step": "prediction step"}
_BATCH = ("x", "y", "sample_weight")


class TracedFunction(NamedTuple):
    """What is known about a traced function."""

    step: str | None
    """ "training step", "evaluation step" or "prediction step" of a Keras model; None for another function."""
    model: keras.Model | None
    """The model; None for another function."""
    inputs: tuple[str, ...]
    """Its tensor arguments in TensorFlow's order, as the user knows them: `x["image"]`, `y`; empty if unknown."""
    variables: tuple[str, ...]
    """Names of the variables it uses."""


def traced_function(name: str) -> TracedFunction | None:
    """Returns what is known about the function that TensorFlow calls `name`, or None if it no longer exists.

    TensorFlow keeps no list of its functions, so Python's garbage collector is asked for all of them (some 50 ms).
    """
    for function in gc.get_objects():
        if type(function) is Function:  # isinstance would wake lazy objects
            # Its own list of them would trace it if it has an input signature.
            for concrete in function._function_cache.values():
                if concrete.name.decode() == name:
                    return _described(function.python_function, concrete)
    return None


def _described(function: Any, concrete: Any) -> TracedFunction:
    model, step = None, None
    if getattr(function, "__name__", "") == "one_step_on_data":
        outer = inspect.getclosurevars(inspect.unwrap(function)).nonlocals
        owner = outer.get("self")
        model = owner if isinstance(owner, keras.Model) else None
        # Keras closes over train_step or test_step; the step of prediction is called through the model.
        step = _STEPS.get(getattr(outer.get("step_function"), "__name__", "predict_step")) if model else None
    names = tuple(_input_names(concrete, is_step=step is not None))
    return TracedFunction(step, model, names, tuple(variable.name for variable in concrete.variables))


def _input_names(concrete: Any, *, is_step: bool) -> Iterator[str]:
    args, kwargs = concrete.structured_input_signature
    parameters = list(concrete.function_type.parameters)
    named = dict(zip(parameters, args, strict=False)) | kwargs
    if is_step and len(args) == 1 and isinstance(args[0], tuple) and len(args[0]) <= len(_BATCH):
        named = dict(zip(_BATCH, args[0], strict=False))
    for name, value in named.items():
        for path, leaf in paths_and_leaves(value):
            if isinstance(leaf, tf.TypeSpec):  # a Python value is no input
                yield name + "".join(f"[{key!r}]" for key in path).replace("'", '"')
