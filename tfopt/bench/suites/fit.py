"""`fit`, stock and overlapped, beside the step alone: what the host adds to each step, and whether the weights agree.

On a CPU a tiny net. On a GPU also ResNet-50 fed in several ways, and what the kernels do to a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import keras
import tensorflow as tf

from tfopt import fit, precision
from tfopt.bench.cases import REPEATS, Case, Scale, Timer, Variant, flat_weights, kernels, same_values
from tfopt.bench.workloads import digits, photos
from tfopt.measure import FitTimer, StepTimer
from tfopt.pipelines import build_pipeline

_BATCHES = 64  # different ones, over and over
_SAMPLES = 4  # few and long beside the wait at a sample's end
_POLICY, _DTYPE = "mixed_bfloat16", "bfloat16"
_LAUNCH = 16  # steps at once
_RESNET_STEPS, _RESNET_SAMPLES = 30, 2
_RESNET_WARMUP = 8  # uses up what was ready before the first sample


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size, those that say most first."""
    if scale.resnet is None:
        # So small that what fit adds is not lost in the step.
        return [_case("mlp, tiny", _Workload(width=16, batch_size=8, jit_compile=False, steps=5 * scale.steps))]
    large = _Workload(width=512, batch_size=scale.batch_size, jit_compile=True, steps=2 * scale.steps)
    return [
        resnet50_case(scale.resnet),
        kernels.gpt2_case(),
        _case("mlp", large),
        *kernels.attention_cases(),
        kernels.batch_norm_case(scale.resnet),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """Size of the perceptron, and steps timed in each turn."""

    width: int
    batch_size: int
    jit_compile: bool
    steps: int

    def net(self) -> keras.Model:
        return digits.perceptron(width=self.width, jit_compile=self.jit_compile)


_Data = Callable[[], tuple[Any, Any]]


def _case(name: str, workload: _Workload) -> Case:
    data = cache(partial(_data, workload.batch_size))
    variants = {
        "stock fit": ("model.fit as it is", 0),
        "overlap": ("after tfopt.fit.overlap; goal on a GPU: 1.15 times the time of the step alone", 1),
        f"launches of {_LAUNCH}": (
            f"overlap(steps_per_launch={_LAUNCH}); goal on a GPU: 1.05 times that time",
            _LAUNCH,
        ),
    }
    fits = [
        Variant(
            name=variant,
            note=note,
            timer=partial(_fit_timer, workload, data, steps),
            values=partial(_fitted, workload, data, steps),
        )
        for variant, (note, steps) in variants.items()
    ]
    alone = Variant(
        name="step alone",
        note="the ceiling: one batch, on the device from the start",
        timer=partial(_step_timer, workload, data),
        values=partial(_stepped, workload, data),
        ceiling=True,
    )
    return Case(
        suite="fit",
        workload=name,
        question="What does fit add to the step of a small net?",
        unit="step",
        variants=[*fits, alone],
        # On a GPU two compilations of one step may choose different algorithms.
        judge=None
        if workload.jit_compile
        else same_values(f"every weight after {_BATCHES} steps, bit for bit", "same weights"),
        repeats=2 * REPEATS,  # short turns: the host's speed drifts more than a GPU's
    )


def _data(batch_size: int) -> tuple[Any, Any]:
    """Images, shape (batches, batch size, 784), and labels, shape (batches, batch size)."""
    images, labels = digits.perceptron_batch(_BATCHES * batch_size)
    return images.reshape(_BATCHES, batch_size, -1), labels.reshape(_BATCHES, batch_size)


def _dataset(data: _Data) -> tf.data.Dataset:
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        return tf.data.Dataset.from_tensor_slices(data()).prefetch(2)


def _fit_timer(workload: _Workload, data: _Data, steps_per_launch: int, stack: ExitStack) -> Timer:
    net = stack.enter_context(_overlap(workload.net(), steps_per_launch))
    return partial(FitTimer(net, _dataset(data)), workload.steps, samples=_SAMPLES)


def _step_timer(workload: _Workload, data: _Data, stack: ExitStack) -> Timer:
    images, labels = data()
    return partial(StepTimer(workload.net(), (images[0], labels[0])), workload.steps, samples=_SAMPLES)


def _fitted(workload: _Workload, data: _Data, steps_per_launch: int) -> Sequence[float]:
    keras.utils.set_random_seed(0)
    with _overlap(workload.net(), steps_per_launch) as net:
        net.fit(_dataset(data), verbose=0, shuffle=False)
    return flat_weights(net)


def _stepped(workload: _Workload, data: _Data) -> Sequence[float]:
    keras.utils.set_random_seed(0)
    net = workload.net()
    for images, labels in zip(*data(), strict=True):
        net.train_on_batch(images, labels)
    return flat_weights(net)


@contextmanager
def _overlap(net: keras.Model, steps_per_launch: int) -> Iterator[keras.Model]:
    """Overlaps the net unless that is 0, and undoes it afterwards, since it also changes Keras' callback list."""
    if steps_per_launch:
        fit.overlap(net, steps_per_launch=steps_per_launch)
    try:
        yield net
    finally:
        fit.undo(net)


def resnet50_case(batch_size: int) -> Case:
    """ResNet-50 under XLA, fed in several ways from uint8 rows in memory, beside its step on a resident batch."""
    photographs = cache(partial(photos.rows, batch_size))
    # Not "auto", which would put the examples on the device, where they fit.
    pipeline = partial(_resnet_pipeline, photographs, batch_size, cache=None)
    batches = partial(_resnet_batches, photographs, batch_size)
    on_device = partial(_resnet_pipeline, photographs, batch_size, cache="device")
    fed: dict[str, tuple[str, bool, Callable[[], tf.data.Dataset]]] = {
        "stock fit": ("build_pipeline", False, pipeline),
        "overlap": ("the same after tfopt.fit.overlap; goal: 0.98 of the ceiling's speed", True, pipeline),
        'overlap, cache="device"': ("the examples lie on the device; goal: 0.99 of the ceiling's", True, on_device),
        "stock fit, whole batches": ("prepared batches, out of pageable memory; no goal", False, batches),
        "overlap, whole batches": ("the same after tfopt.fit.overlap; no goal", True, batches),
    }
    ceiling = Variant(
        name="step alone",
        note="the ceiling: one batch, on the device from the start",
        timer=partial(_resnet_step_timer, photographs, batch_size),
        ceiling=True,
        dtype=_DTYPE,
    )
    variants = [
        Variant(name=name, note=note, timer=partial(_resnet_fit_timer, make, overlapped), dtype=_DTYPE)
        for name, (note, overlapped, make) in fed.items()
    ]
    return Case(
        suite="fit",
        workload="resnet50",
        question="How much of the step's own speed is left when fit feeds ResNet-50 (mixed_bfloat16, XLA)?",
        unit="step",
        variants=[*variants, ceiling],
        model=photos.resnet50,
    )


def _resnet_pipeline(photographs: _Data, batch_size: int, **options: Any) -> tf.data.Dataset:
    return build_pipeline(photographs(), batch_size=batch_size, **options)


def _resnet_batches(photographs: _Data, batch_size: int) -> tf.data.Dataset:
    batches = tuple(part.reshape(photos.BATCHES, batch_size, *part.shape[1:]) for part in photographs())
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        return tf.data.Dataset.from_tensor_slices(batches).prefetch(2)


def _resnet_fit_timer(make: Callable[[], tf.data.Dataset], overlapped: bool, stack: ExitStack) -> Timer:
    with precision.policy(_POLICY):
        net = stack.enter_context(_overlap(photos.resnet50(jit_compile=True), int(overlapped)))
    return partial(FitTimer(net, make()), _RESNET_STEPS, warmup=_RESNET_WARMUP, samples=_RESNET_SAMPLES)


def _resnet_step_timer(photographs: _Data, batch_size: int, stack: ExitStack) -> Timer:
    images, labels = photographs()
    with precision.policy(_POLICY):
        timer = StepTimer(photos.resnet50(jit_compile=True), (images[:batch_size], labels[:batch_size]))
    return partial(timer, _RESNET_STEPS, warmup=1, samples=_RESNET_SAMPLES)
