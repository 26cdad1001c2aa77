"""Noisy textures of ten classes, and small nets that learn them: a residual one, a mobile one and a transformer."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import keras
import numpy as np

from tfopt.bench.workloads.gpt2 import Positions

EPOCHS = 10  # of the whole training
BATCH = 64
TEST_EXAMPLES = 1000
_TRAIN_EXAMPLES = 4000
_SIZE, _CLASSES = 32, 10
_NOISE = 1.5  # standard deviation; the textures' own is 1


class Split(NamedTuple):
    """Images, shape (examples, 32, 32, 3), float32; labels, shape (examples,), int32."""

    images: Any
    labels: Any


@cache
def data() -> tuple[Split, Split]:
    """Returns the examples to train on and to test on; always the same.

    Each class is one texture of coarse random colours. An example is its class's texture, shifted cyclically, with its
    contrast scaled by 0.5 to 1.5, plus noise.
    """
    random = np.random.default_rng(0)
    count = _TRAIN_EXAMPLES + TEST_EXAMPLES
    textures = random.normal(size=(_CLASSES, 8, 8, 3)).repeat(4, 1).repeat(4, 2)
    labels = random.integers(_CLASSES, size=count).astype("int32")
    shifts = random.integers(_SIZE, size=(count, 2))
    images = np.stack([np.roll(textures[label], shift, (0, 1)) for label, shift in zip(labels, shifts, strict=True)])
    images *= random.uniform(0.5, 1.5, (count, 1, 1, 1))
    images += random.normal(scale=_NOISE, size=images.shape)
    parts = slice(None, _TRAIN_EXAMPLES), slice(_TRAIN_EXAMPLES, None)
    train, test = (Split(images[part].astype("float32"), labels[part]) for part in parts)
    return train, test


def resnet(width: int = 32) -> keras.Model:
    """Three residual blocks (He et al., 2016), from `width` channels to four times as many."""
    layers = keras.layers
    images = keras.Input((_SIZE, _SIZE, 3))
    hidden = layers.ReLU()(_convolution(images, width, 3, strides=2))
    for channels, strides in ((width, 1), (2 * width, 2), (4 * width, 2)):
        inner = layers.ReLU()(_convolution(hidden, channels, 3, strides=strides))
        inner = _convolution(inner, channels, 3)
        around = hidden if strides == 1 else _convolution(hidden, channels, 1, strides=strides)
        hidden = layers.ReLU()(layers.Add()([inner, around]))
    return keras.Model(images, _classes(layers.GlobalAveragePooling2D()(hidden)))


def mobilenet(width: int = 32) -> keras.Model:
    """Four inverted residual blocks with depthwise convolutions (Sandler et al., "MobileNetV2", 2018)."""
    layers = keras.layers
    images = keras.Input((_SIZE, _SIZE, 3))
    hidden = layers.ReLU(6)(_convolution(images, width, 3, strides=2))
    for channels, strides in ((width, 1), (2 * width, 2), (2 * width, 1), (4 * width, 2)):
        inner = layers.ReLU(6)(_convolution(hidden, 4 * hidden.shape[-1], 1))
        inner = layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)(inner)
        inner = _convolution(layers.ReLU(6)(_normalized(inner)), channels, 1)
        hidden = layers.Add()([hidden, inner]) if hidden.shape == inner.shape else inner
    hidden = layers.ReLU(6)(_convolution(hidden, 8 * width, 1))
    return keras.Model(images, _classes(layers.GlobalAveragePooling2D()(hidden)))


def vit(width: int = 96) -> keras.Model:
    """Three transformer blocks of four heads on patches of 4×4 pixels (Dosovitskiy et al., 2021)."""
    layers = keras.layers
    images = keras.Input((_SIZE, _SIZE, 3))
    patches = layers.Reshape((-1, width))(layers.Conv2D(width, 4, strides=4)(images))
    hidden = Positions()(patches)
    for _ in range(3):
        normal = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(4, width // 4)(normal, normal)
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(hidden))
        hidden = hidden + layers.Dense(width)(inner)
    return keras.Model(images, _classes(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(hidden))))


NETS: dict[str, Callable[[], keras.Model]] = {"resnet, small": resnet, "mobilenet, small": mobilenet, "vit, small": vit}


def compiled(net: keras.Model, epochs: int, rate: float, batch_size: int = BATCH) -> keras.Model:
    """Compiles a net with Adam, its learning rate falling from `rate` to 0 over `epochs`, and returns it."""
    steps = epochs * -(-_TRAIN_EXAMPLES // batch_size)
    net.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return net


def _convolution(inputs: Any, channels: int, size: int, strides: int = 1) -> Any:
    convolution = keras.layers.Conv2D(channels, size, strides, padding="same", use_bias=False)
    return _normalized(convolution(inputs))


def _normalized(inputs: Any) -> Any:
    # Keras' momentum of 0.99 would need more steps than a tenth of this training has.
    return keras.layers.BatchNormalization(momentum=0.9)(inputs)


def _classes(inputs: Any) -> Any:
    return keras.layers.Dense(_CLASSES, dtype="float32")(inputs)
