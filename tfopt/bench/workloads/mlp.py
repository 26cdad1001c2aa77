"""A perceptron so small that `fit` spends more time between the steps than in them."""

from typing import Any

import keras
import numpy as np

from tfopt.bench.workloads import digits

PIXELS, CLASSES = 784, 10


def model(*, width: int = 512, jit_compile: bool | str = "auto") -> keras.Model:
    """Returns the net 784-width-width-10, compiled with Adam, under the global dtype policy.

    Args:
        width: Units in each hidden layer.
        jit_compile: As for `keras.Model.compile`.
    """
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((PIXELS,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    net.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return net


def batch(size: int) -> tuple[Any, Any]:
    """Returns one batch of digits at MNIST's 28×28: each pixel enlarged to 4×4, and 2 cut from each edge.

    Returns:
        Images, shape (size, 784), float32 from 0 to 1; labels, shape (size,), int32.
    """
    images, labels = digits.batch(size)
    large = images[..., 0].repeat(4, axis=1).repeat(4, axis=2)[:, 2:-2, 2:-2]
    return np.ascontiguousarray(large.reshape(size, PIXELS)), labels
