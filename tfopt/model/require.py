"""Checks of a model before anything is measured or changed."""

from typing import Any

import keras


def require_model(model: Any) -> None:
    """Raises a TypeError if `model` is not a Keras model."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a keras.Model. Received: {model!r} of type {type(model).__name__}. Pass the model itself."
        )


def require_compiled(model: keras.Model) -> keras.Model:
    """Returns the model if it is compiled.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the model is not compiled, so it has no training step yet.
    """
    require_model(model)
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: {model.name!r}, which is not compiled. "
            "Call model.compile(optimizer, loss) first."
        )
    return model


def is_keras_own(layer: keras.Layer) -> bool:
    """Whether a layer's class is Keras' own; a user's subclass may compute anything."""
    return type(layer).__module__.startswith("keras.")
