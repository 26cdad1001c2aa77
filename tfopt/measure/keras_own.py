"""Keras' own layers told from the user's, of whose code nothing is known."""

import keras


def is_keras_own(layer: keras.Layer) -> bool:
    """Whether a layer's class is one of Keras, not a subclass of the user's."""
    return type(layer).__module__.startswith("keras.")
