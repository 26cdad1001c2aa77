"""What a training step holds at its peak: by which operation, of which layer, and in which phase."""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.model.layers import calls_wrapped, layer_paths

FORWARD, BACKWARD, UPDATE = range(3)
"""Phases of a training step."""


class Peak(NamedTuple):
    """What a step holds when it holds most, in bytes, apart from its variables and its batch."""

    total: int
    gradients: int
    """Of variables, waiting for the optimizer."""
    activations: collections.Counter[tuple[str, ...]]
    """What the forward pass keeps for the backward pass: by the operation that made it and those that called it, the
    innermost first."""


class Phases:
    """Tells the forward pass, the backward pass and the optimizer's update apart, by the names of operations.

    Args:
        optimizers: Names of the optimizers.
    """

    def __init__(self, optimizers: Iterable[str]):
        names = "|".join(map(re.escape, optimizers))
        self._update = re.compile(rf"(^|/)({names})(_\d+)?/" if names else "$^")
        self._backward = re.compile(r"(^|/)gradient(_tape|s)(_\d+)?/")

    def named(self, name: str) -> int:
        """The phase that an operation's name shows. Callers count what follows from a gradient as backward."""
        if self._update.search(name):
            return UPDATE
        return BACKWARD if self._backward.search(name) else FORWARD


@contextmanager
def scopes_recorded(model: keras.Model) -> Iterator[dict[str, str]]:
    """Records, by name scope, the path of the layer that is called in it."""
    paths = layer_paths(model)
    scopes: dict[str, str] = {}

    def recorded(layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            scopes[tf.get_current_name_scope()] = paths[layer]
            return method(*args, **kwargs)

        return call

    with calls_wrapped(list(paths), recorded):
        yield scopes


def layer_of(name: str, scopes: Mapping[str, str]) -> str | None:
    """The path of the innermost layer in whose scope an operation lies."""
    parts = name.split("/")
    # From outside in: a function's operations bear the name of its call before their own.
    for start in range(len(parts)):
        for end in range(len(parts) - 1, start, -1):
            path = scopes.get("/".join(parts[start:end]))
            if path is not None:
                return path
    return None
