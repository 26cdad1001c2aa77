"""Times training steps of pruned nets, with their accuracy, and inference in 8 bits; on a GPU, ResNet-50 too."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from statistics import fmean
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt import compress, precision
from tfopt.bench.cases import Case, DrawTimer, Scale, Timer, Variant
from tfopt.bench.results import Check
from tfopt.bench.workloads import photos, textures
from tfopt.measure import StepTimer
from tfopt.text import percent

_SHARE = 0.5  # of what can be cut
_TENTH = textures.EPOCHS // 10
_RATE = 1e-3  # the learning rate
_LEARNED = 0.9  # accuracy of a whole net, below which the comparison says nothing
_MAX_LOSS_OF_ACCURACY = 0.01
_STEPS, _SAMPLES = 6, 2
_CALLS = 60
_MAX_DISTANCE = 0.05  # as for `compress.quantize`
_WIDTH, _EXAMPLES = 1024, 64  # of the perceptron in integers


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    nets = [_pruning(name, net, scale) for name, net in textures.NETS.items()]
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
                note=f"{textures.EPOCHS} epochs",
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
    return textures.compiled(net(), textures.EPOCHS, _RATE)


def _batch() -> tuple[Any, Any]:
    train, _ = textures.data()
    return train.images[: textures.BATCH], train.labels[: textures.BATCH]


def _timer(make: Callable[[], keras.Model], batch: Callable[[], Any], stack: ExitStack) -> Timer:
    net = make()
    gc.collect()  # or what pruning compared would count as this variant's memory
    return partial(StepTimer(net, batch()), _STEPS, samples=_SAMPLES)


def _trained(net: Callable[[], keras.Model], seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model, (train, _) = _compiled(net), textures.data()
    model.fit(*train, batch_size=textures.BATCH, epochs=textures.EPOCHS, verbose=0)
    return model


def _pruned(teacher: keras.Model, seed: int) -> keras.Model:
    """Prunes a trained net, and trains it for a tenth of the epochs more."""
    keras.utils.set_random_seed(seed)
    train, _ = textures.data()
    size = textures.BATCH // 2  # for twice as many updates
    batches = tf.data.Dataset.from_tensor_slices(tuple(train)).batch(size)
    student = compress.prune(teacher, batches, _SHARE).model
    textures.compiled(student, _TENTH, _RATE, size)
    compress.distil(teacher, student, batches)
    student.fit(*train, batch_size=size, epochs=_TENTH, verbose=0)
    return student


def _accuracy(model: keras.Model) -> float:
    _, test = textures.data()
    found = model.evaluate(*test, batch_size=textures.TEST_EXAMPLES, verbose=0, return_dict=True)
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
