"""Keras' global state, and the scopes that are open in it."""

from typing import Any

import keras

from tfopt.internals.sources import private

in_stateless_scope = private("keras.src.backend.common.stateless_scope:in_stateless_scope")
"""Whether variables get no values: shapes are inferred, or a function is made of a model."""

in_symbolic_scope = private("keras.src.backend.common.symbolic_scope:in_symbolic_scope")
"""Whether a model is being built from KerasTensors."""

set_keras_mask = private("keras.src.backend.common.masking:set_keras_mask")

_global_state = private("keras.src.backend.common.global_state")

GLOBAL_SEEDS = "global_seed_generator"


def get_state(name: str) -> Any:
    """An attribute of Keras' state, by its name there; None if it was never set."""
    return _global_state.get_global_attribute(name)


def set_state(name: str, value: Any) -> None:
    """Sets an attribute of Keras' state. None means that it was never set."""
    _global_state.set_global_attribute(name, value)


def global_seeds() -> keras.random.SeedGenerator | None:
    """The seeds of layers and functions that have none of their own; None before any was drawn."""
    generator: keras.random.SeedGenerator | None = get_state(GLOBAL_SEEDS)
    return generator


def call_context() -> Any:
    """What the outermost layer in a call was called with, such as `training`; None outside of calls."""
    return get_state("current_call_ctx")
