"""Calls functions on the elements of a dataset, and measures what an element holds."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def without_autograph(function: Function) -> Function:
    """Marks one of tfopt's own functions for AutoGraph to skip. It must not call a user's function."""
    marked: Function = tf.autograph.experimental.do_not_convert(function)
    return marked


def apply(function: Callable[..., Any], element: Any, **keywords: Any) -> Any:
    """Calls a function on an element as `Dataset.map` does: a tuple is spread over the arguments."""
    return function(*element, **keywords) if type(element) is tuple else function(element, **keywords)


# Not marked do_not_convert: AutoGraph must reach the user's function, as in Dataset.map.
def apply_stage(stage: str, function: Callable[..., Any], element: Any, **keywords: Any) -> Any:
    """Calls a stage's function on an element, under the stage's name in the graph."""
    with tf.name_scope(stage):
        return apply(function, element, **keywords)


def element_of(arguments: tuple[Any, ...], spec: Any) -> Any:
    """Returns the element that `Dataset.map` spread over these arguments, given the dataset's element spec."""
    return arguments if type(spec) is tuple else arguments[0]


def accepts_seed(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `seed` that can be passed by keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions have no signature
        return False
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return "seed" in parameters and parameters["seed"].kind in keyword


def leaves(element: Any) -> list[Any]:
    """Returns the tensors of an element in a fixed order; ragged and sparse ones whole."""
    return list(tf.nest.flatten(element))


def size_bytes(element: Any) -> int:
    """Returns the memory an eager element takes; strings count their bytes."""
    return sum(_tensor_bytes(tensor) for tensor in tf.nest.flatten(element, expand_composites=True))


def is_static(spec: Any) -> bool:
    """Whether every dense tensor of an element spec has a fully known shape."""
    dense = [leaf for leaf in leaves(spec) if isinstance(leaf, tf.TensorSpec)]
    return all(leaf.shape.is_fully_defined() for leaf in dense)


def first_line(error: BaseException) -> str:
    """Returns the message of a TensorFlow error without names of functions and nodes."""
    text = re.sub(r"\{\{[^}]*\}\}", "", str(error)).strip()
    if not text:
        return type(error).__name__
    line = re.sub(r"^Error in user-defined function passed to .*?: Iterator::\S+: ", "", text.splitlines()[0])
    return re.sub(r"\s*\[Op:\w+\].*", "", line).strip().rstrip(".")


def _tensor_bytes(tensor: Any) -> int:
    if tensor.dtype == tf.string:
        return sum(map(len, tensor.numpy().ravel().tolist())) if tensor.shape.rank else len(tensor.numpy())
    return int(tensor.dtype.size) * int(tensor.shape.num_elements())
