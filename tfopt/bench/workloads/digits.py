"""Scikit-learn's 1,797 handwritten digits of 8×8 pixels, a small convolutional net and a perceptron."""

from functools import cache
from typing import Any, NamedTuple

import keras
import numpy as np

from tfopt.bench.workloads import require
from tfopt.pipelines import build_pipeline

TEST_EXAMPLES = 360
_EPOCHS = 8


class Split(NamedTuple):
    """Images, shape (examples, 8, 8, 1), float32 from 0 to 1; labels, shape (examples,), int32."""

    images: Any
    labels: Any


@cache
def data() -> tuple[Split, Split]:
    """Returns the digits, split for training and test; always the same split."""
    digits = require("sklearn.datasets").load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    labels = digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def conv_net(*, width: int = 1, jit_compile: bool | str = "auto") -> keras.Model:
    """Returns a compiled convolutional net, with `width` times as many channels, under the global dtype policy."""
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16 * width, 3, padding="same", use_bias=False),
            # Keras' momentum of 0.99 would need more steps than this training has.
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32 * width, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, dtype="float32"),
        ]
    )
    net.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit_compile,
    )
    return net


def batch(size: int) -> tuple[Any, Any]:
    """Returns one batch of training examples."""
    train, _ = data()
    return np.resize(train.images, (size, 8, 8, 1)), np.resize(train.labels, size)


def accuracy(seed: int, *, width: int = 1, jit_compile: bool | str = "auto") -> float:
    """Trains the convolutional net from scratch and returns its accuracy on the test digits."""
    keras.utils.set_random_seed(seed)
    train, test = data()
    net = conv_net(width=width, jit_compile=jit_compile)
    # Batches of 64 on any device: eight epochs need the updates.
    net.fit(build_pipeline(train, batch_size=64, seed=seed, remainder="drop"), epochs=_EPOCHS, verbose=0)
    return float(net.evaluate(*test, batch_size=TEST_EXAMPLES, verbose=0, return_dict=True)["accuracy"])


def perceptron(*, width: int = 512, jit_compile: bool | str = "auto") -> keras.Model:
    """Returns a compiled net 784-width-width-10, so small that `fit` takes more time between the steps than in them."""
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(10, dtype="float32"),
        ]
    )
    net.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return net


def perceptron_batch(size: int) -> tuple[Any, Any]:
    """Returns one batch at MNIST's 28×28: each pixel enlarged to 4×4, and 2 cut from each edge.

    Returns:
        Images, shape (size, 784), float32 from 0 to 1; labels, shape (size,), int32.
    """
    images, labels = batch(size)
    large = images[..., 0].repeat(4, axis=1).repeat(4, axis=2)[:, 2:-2, 2:-2]
    return np.ascontiguousarray(large.reshape(size, 784)), labels
