"""Times training steps of pruned nets, with their accuracy, and inference in 8 bits; on a GPU, ResNet-50 too.

    python benchmarks/compress.py [FOLDER] [--case NAME]

The nets are a small residual one, a mobile one and a transformer, which learn noisy textures of ten classes. Half of
what can be cut is pruned; then the net is trained for one epoch with `distil`. Its test accuracy may be one percentage
point lower than that of the whole net, trained for ten; outputs in 8 bits may be 5 % apart.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

import harness
import keras
import numpy as np
import tensorflow as tf

from tfopt import compress, precision
from tfopt.bench.cases import Case, DrawTimer, Scale, Timer, Variant
from tfopt.bench.results import Check
from tfopt.bench.workloads import photos
from tfopt.bench.workloads.gpt2 import Positions
from tfopt.measure import StepTimer
from tfopt.text import percent

EPOCHS = 10  # of the whole training
BATCH = 64
TEST_EXAMPLES = 1000
_TRAIN_EXAMPLES = 4000
_SIZE, _CLASSES = 32, 10  # of the images
_NOISE = 1.5  # standard deviation; the textures' own is 1
_SHARE = 0.5  # of what can be cut
_TENTH = EPOCHS // 10
_RATE = 1e-3  # the learning rate
_LEARNED = 0.9  # accuracy of a whole net, below which the comparison says nothing
_MAX_LOSS_OF_ACCURACY = 0.01
_STEPS, _SAMPLES = 6, 2
_CALLS = 60
_MAX_DISTANCE = 0.05  # as for `compress.quantize`
_WIDTH, _EXAMPLES = 1024, 64  # of the perceptron in integers


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


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    nets = [_pruning(name, net, scale) for name, net in NETS.items()]
    return [*nets, *([_resnet50(scale.resnet)] if scale.resnet else []), _integers()]


def _pruning(name: str, net: Callable[[], keras.Model], scale: Scale) -> Case:
    trained = cache(partial(_trained, net))
    return Case(
        suite="compress",
        workload=name,
        question=f"How fast is a step, and how accurate the net, after pruning {percent(_SHARE)} of what can be cut?",
        unit="training step",
        variants=[
            Variant(
                name="whole",
                note=f"{EPOCHS} epochs",
                timer=partial(_timer, partial(_compiled, net), _batch),
                values=lambda: [_accuracy(trained(seed)) for seed in scale.seeds],
            ),
            Variant(
                name=f"pruned {name.partition(',')[0]}",
                note=f"compress.prune; accuracy after {_TENTH} epoch of compress.distil, which the step leaves out",
                timer=partial(_timer, lambda: compress.prune(_compiled(net), _batch(), _SHARE).model, _batch),
                values=lambda: [_accuracy(_pruned(trained(seed), seed)) for seed in scale.seeds],
            ),
        ],
        judge=_nearly_as_accurate,
    )


def _compiled(net: Callable[[], keras.Model]) -> keras.Model:
    return compiled(net(), EPOCHS, _RATE)


def _batch() -> tuple[Any, Any]:
    train, _ = data()
    return train.images[:BATCH], train.labels[:BATCH]


def _timer(make: Callable[[], keras.Model], batch: Callable[[], Any], stack: ExitStack) -> Timer:
    net = make()
    gc.collect()  # or what pruning compared would count as this variant's memory
    return partial(StepTimer(net, batch()), _STEPS, samples=_SAMPLES)


def _trained(net: Callable[[], keras.Model], seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model, (train, _) = _compiled(net), data()
    model.fit(*train, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    return model


def _pruned(teacher: keras.Model, seed: int) -> keras.Model:
    """Prunes a trained net, and trains it for a tenth of the epochs more."""
    keras.utils.set_random_seed(seed)
    train, _ = data()
    size = BATCH // 2  # for twice as many updates
    batches = tf.data.Dataset.from_tensor_slices(tuple(train)).batch(size)
    student = compress.prune(teacher, batches, _SHARE).model
    compiled(student, _TENTH, _RATE, size)
    compress.distil(teacher, student, batches)
    student.fit(*train, batch_size=size, epochs=_TENTH, verbose=0)
    return student


def _accuracy(model: keras.Model) -> float:
    _, test = data()
    found = model.evaluate(*test, batch_size=TEST_EXAMPLES, verbose=0, return_dict=True)
    return float(found["accuracy"])


def _nearly_as_accurate(baseline: Sequence[float], values: Sequence[float]) -> Check:
    whole, mean = fmean(baseline), fmean(values)
    points = f"{100 * _MAX_LOSS_OF_ACCURACY:g} percentage point"
    return Check(
        what=f"mean test accuracy, seeds: {len(values)}; at most {points} below the whole net's, which has learned",
        values=tuple(values),
        passed=whole >= _LEARNED and mean >= whole - _MAX_LOSS_OF_ACCURACY,
        text=f"{percent(mean)} accuracy",
    )


def _resnet50(batch_size: int) -> Case:
    batch = cache(partial(photos.batch, batch_size, count=photos.PHOTOGRAPHS))
    policy = precision.recommend().policy

    def net() -> keras.Model:
        with precision.policy(policy):
            return photos.resnet50(jit_compile=True)

    ways = {"whole": net, "pruned resnet50": lambda: compress.prune(net(), batch(), _SHARE).model}
    return Case(
        suite="compress",
        workload="resnet50",
        question=f"How much faster is ResNet-50's step without {percent(_SHARE)} of its channels ({policy}, XLA)?",
        unit="training step",
        variants=[
            Variant(name=name, note="from random weights", timer=partial(_timer, make, batch))
            for name, make in ways.items()
        ],
    )


def _integers() -> Case:
    quantized = cache(lambda: compress.quantize(_perceptron(), _vectors()).model)  # it may refuse: decided once
    ways: dict[str, tuple[str, Callable[[], keras.Model]]] = {
        "float32": ("as it is", _perceptron),
        "8 bits": ("compress.quantize", quantized),
    }
    return Case(
        suite="compress",
        workload="mlp, inference",
        question=f"Is a perceptron of four layers of {_WIDTH:,} faster in 8 bits (XLA)?",
        unit=f"prediction of {_EXAMPLES} examples",
        variants=[
            Variant(name=name, note=note, timer=partial(_predictions, make), values=partial(_outputs, make))
            for name, (note, make) in ways.items()
        ],
        judge=_near,
    )


def _perceptron() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(4)]
    net = keras.Sequential([keras.Input((_WIDTH,)), *layers, keras.layers.Dense(10)])
    net.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    return net


def _vectors() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(_EXAMPLES, _WIDTH)).astype("float32"), random.integers(10, size=_EXAMPLES)


def _predictions(make: Callable[[], keras.Model], stack: ExitStack) -> Timer:
    net, inputs = make(), tf.constant(_vectors()[0])
    predict = tf.function(partial(net, training=False), jit_compile=True, autograph=False)
    return partial(DrawTimer(lambda: [predict(inputs)], _EXAMPLES), _CALLS, warmup=1, samples=_SAMPLES)


def _outputs(make: Callable[[], keras.Model]) -> Sequence[float]:
    return [float(value) for value in np.ravel(make().predict(_vectors()[0], verbose=0))]


def _near(baseline: Sequence[float], values: Sequence[float]) -> Check:
    apart = float(np.linalg.norm(np.subtract(values, baseline)) / np.linalg.norm(baseline))
    return Check(
        what=f"distance of the outputs from the baseline's, over their norm: at most {percent(_MAX_DISTANCE)}",
        values=(apart,),
        passed=apart <= _MAX_DISTANCE,
        text=f"{percent(apart)} apart",
    )


if __name__ == "__main__":
    harness.run_cases(__doc__, cases)
