"""ResNet-50 on photographs of 224×224 pixels."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.bench.workloads import photos

CLASSES = 1000
PHOTOGRAPHS = 256  # different ones: to write more of them would take longer than to train on them
BATCHES = 40  # in `rows`, so that no epoch ends while steps are timed


def model(*, jit_compile: bool | str = "auto", size: int = photos.SIZE) -> keras.Model:
    """Returns ResNet-50 with random weights, compiled with SGD and momentum, under the global dtype policy.

    Args:
        jit_compile: As for `keras.Model.compile`.
        size: Height and width of the images.
    """
    images = keras.Input((size, size, 3), dtype="uint8")
    features = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    base = keras.applications.ResNet50(
        weights=None, classes=CLASSES, classifier_activation=None, input_tensor=None, input_shape=(size, size, 3)
    )
    logits = keras.layers.Activation("linear", dtype="float32")(base(features))
    net = keras.Model(images, logits)
    net.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return net


def batch(size: int, *, count: int, pixels: int = photos.SIZE) -> tuple[Any, Any]:
    """Returns one batch of uint8 photographs, shape (size, pixels, pixels, 3), and their labels, shape (size,).

    Args:
        size: Examples.
        count: How many files the photographs are taken from.
        pixels: Height and width.
    """
    dataset = photos.naive(photos.folder(count), 1).unbatch().repeat().batch(size)
    images, labels = next(iter(dataset))
    return images[:, :pixels, :pixels], tf.cast(labels, tf.int32)


def rows(batch_size: int) -> tuple[Any, Any]:
    """Returns photographs, uint8 of shape (examples, 224, 224, 3), and their labels, for 40 batches."""
    images, labels = (part.numpy() for part in batch(PHOTOGRAPHS, count=PHOTOGRAPHS))
    examples = BATCHES * batch_size
    return np.resize(images, (examples, *images.shape[1:])), np.resize(labels, examples)
