"""What is expected of a model before anything is measured or changed."""

from typing import Any

import keras


def require_model(model: Any) -> None:
    """Raises a TypeError where something is no Keras model."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a keras.Model. Received: {model!r} of type {type(model).__name__}. Pass the model itself."
        )


def require_compiled(model: keras.Model) -> keras.Model:
    """Returns the model.

    Raises:
        TypeError: It is no Keras model.
        ValueError: It is not compiled: it has no training step yet.
    """
    require_model(model)
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: {model.name!r}, which is not compiled. "
            "Call model.compile(optimizer, loss) first."
        )
    return model
