"""The tuples and dicts that a source is given, walked in the order of `tf.nest`."""

from collections.abc import Iterator
from typing import Any

from tfopt.errors import PipelineError


def named_leaves(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields each leaf of nested tuples and dicts with the expression that reaches it.

    Args:
        data: Tuples and dicts; anything else is a leaf.
        name: What the errors call `data`.

    Raises:
        TypeError: The keys of a dict do not sort, as TensorFlow sorts them.
    """
    if isinstance(data, dict):
        for key in _sorted_keys(data, name):
            yield from named_leaves(data[key], f"{name}[{key!r}]")
    elif isinstance(data, tuple):
        for index, value in enumerate(data):
            yield from named_leaves(value, f"{name}[{index}]")
    else:
        yield name, data


def common_length(lengths: dict[str, int], where: str = "") -> int:
    """Returns the length that all have.

    Args:
        lengths: By the name that errors call it.
        where: Where all of them lie, such as " in 'data.h5'".

    Raises:
        PipelineError: Lengths differ, or there is no example.
    """
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise PipelineError(f"Expected one common length{where}. Found: {listed}. Give as many labels as examples.")
    if not any(lengths.values()):
        found = ", ".join(lengths) or "no array"
        raise PipelineError(f"Expected at least one example{where}. Found none in {found}. Check what fills it.")
    return next(iter(lengths.values()))


def _sorted_keys(data: dict[Any, Any], name: str) -> list[Any]:
    try:
        return sorted(data)
    except TypeError as error:
        raise TypeError(
            f"Expected keys of one type, since TensorFlow sorts them. Received at {name}: {list(data)}. Pass texts."
        ) from error
