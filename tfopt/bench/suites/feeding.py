"""ResNet-50 fed in several ways, beside its step on a batch that lies on the device."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt import fit, precision
from tfopt.bench.cases import Case, Timer, Variant
from tfopt.bench.workloads import resnet50
from tfopt.measure import FitTimer, StepTimer
from tfopt.pipelines import build_pipeline

_POLICY, _DTYPE = "mixed_bfloat16", "bfloat16"
PHOTOGRAPHS = 256  # unlike ones: to write more of them would take longer than to train on them
_BATCHES = 40  # so that no epoch ends while steps are timed
# What was ready before the first sample is used up by the warm-up.
_STEPS, _WARMUP, _SAMPLES = 30, 8, 2
_Rows = Callable[[], tuple[Any, Any]]


def case(batch_size: int) -> Case:
    """The same model under XLA, fed from uint8 rows in memory."""
    photographs = cache(partial(rows, batch_size))
    # Not "auto", which would put the examples on the device, where they fit.
    pipeline = partial(_pipeline, photographs, batch_size, cache=None)
    batches = partial(_batches, photographs, batch_size)
    on_device = partial(_pipeline, photographs, batch_size, cache="device")
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
        timer=partial(_step_timer, photographs, batch_size),
        ceiling=True,
        dtype=_DTYPE,
    )
    variants = [
        Variant(name=name, note=note, timer=partial(_fit_timer, make, overlapped), dtype=_DTYPE)
        for name, (note, overlapped, make) in fed.items()
    ]
    return Case(
        suite="fit",
        workload="resnet50",
        question="How much of the step's own speed is left when fit feeds ResNet-50 (mixed_bfloat16, XLA)?",
        unit="step",
        variants=[*variants, ceiling],
        model=resnet50.model,
    )


def rows(batch_size: int) -> tuple[Any, Any]:
    """Photographs, uint8 of shape (examples, 224, 224, 3), and labels for 40 batches."""
    images, labels = (part.numpy() for part in resnet50.batch(PHOTOGRAPHS, count=PHOTOGRAPHS))
    examples = _BATCHES * batch_size
    return np.resize(images, (examples, *images.shape[1:])), np.resize(labels, examples)


def _pipeline(photographs: _Rows, batch_size: int, **options: Any) -> tf.data.Dataset:
    return build_pipeline(photographs(), batch_size=batch_size, **options)


def _batches(photographs: _Rows, batch_size: int) -> tf.data.Dataset:
    batches = tuple(part.reshape(_BATCHES, batch_size, *part.shape[1:]) for part in photographs())
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        return tf.data.Dataset.from_tensor_slices(batches).prefetch(2)


def _fit_timer(make: Callable[[], tf.data.Dataset], overlapped: bool, stack: ExitStack) -> Timer:
    with precision.policy(_POLICY):
        net = resnet50.model(jit_compile=True)
    if overlapped:
        fit.overlap(net)
        stack.callback(fit.undo, net)
    return partial(FitTimer(net, make()), _STEPS, warmup=_WARMUP, samples=_SAMPLES)


def _step_timer(photographs: _Rows, batch_size: int, stack: ExitStack) -> Timer:
    images, labels = photographs()
    with precision.policy(_POLICY):
        timer = StepTimer(resnet50.model(jit_compile=True), (images[:batch_size], labels[:batch_size]))
    return partial(timer, _STEPS, warmup=1, samples=_SAMPLES)
