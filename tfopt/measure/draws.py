"""Random draws taken out of a model, so that two computations of it can be compared."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from tfopt.model.require import is_keras_own


@contextmanager
def without_dropout(model: keras.Model) -> Iterator[None]:
    """Takes the random draws out of Keras' layers: XLA, and another dtype, draw other numbers from the same seed.

    Either dropout mask is right, but two trainings that differ in their masks cannot be compared.
    """
    # Keras' own layers only: what a rate of 0 does to another is not known.
    layers = [layer for layer in model._flatten_layers() if is_keras_own(layer)]
    names = ("rate", "dropout", "recurrent_dropout", "stddev")
    seeded = [layer for layer in layers if hasattr(layer, "seed_generator")]
    rates = [(layer, name, getattr(layer, name)) for layer in seeded for name in names if hasattr(layer, name)]
    try:
        for layer, name, _ in rates:
            setattr(layer, name, 0.0)
        yield
    finally:
        for layer, name, rate in rates:
            setattr(layer, name, rate)
