"""Trains a workload with each technique on top of the others, and with each alone, from the same weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfopt import fit, kernels, precision
from tfopt.bench.cases import Case, Check, Timer, Variant
from tfopt.bench.suites.kernels import expect_kernel
from tfopt.measure import FitTimer, StepTimer, StepTimes, preserved

_NAIVE, _DEFAULTS = "naive Keras", "Keras' defaults"
_LOSS_STEPS = 10
_SAMPLES = 2  # few and long beside the wait at a sample's end


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a model is trained. By default everything is off, also what TensorFlow and Keras switch on by themselves.

    Attributes:
        tf32: Whether float32 products run in TF32.
        policy: The dtype policy.
        jit_compile: Whether XLA is on; "auto": as Keras decides.
        optimised: Whether tf.data may optimise the naive input.
        pipeline: Whether `build_pipeline` feeds it.
        cache: As for `build_pipeline`.
        overlap: Whether `fit` is overlapped.
        flash: Whether attention runs through cuDNN.
    """

    tf32: bool = False
    policy: str = "float32"
    jit_compile: bool | str = False
    optimised: bool = False
    pipeline: bool = False
    cache: str | None = None
    overlap: bool = False
    flash: bool = False

    @property
    def dtype(self) -> str:
        """What most products are computed in."""
        return self.policy.removeprefix("mixed_") if self.policy != "float32" else "tensor" * self.tf32 + "float32"


_TECHNIQUES: Mapping[str, tuple[dict[str, Any], str]] = {
    "TF32": ({"tf32": True}, "float32 products on Tensor Cores, which TensorFlow does by itself"),
    "mixed_bfloat16": ({"policy": "mixed_bfloat16"}, "bfloat16 compute, float32 weights"),
    "mixed_float16": ({"policy": "mixed_float16"}, "float16 compute, float32 weights, loss scaling"),
    "XLA": ({"jit_compile": True}, "jit_compile=True"),
    "build_pipeline": ({"pipeline": True}, "parallel, prefetched"),
    "overlap": ({"overlap": True}, "tfopt.fit.overlap"),
    "flash attention": ({"flash": True}, "use_flash_attention"),
    'cache="memory"': ({"pipeline": True, "cache": "memory"}, "the decoded examples lie in host memory"),
    'cache="device"': ({"pipeline": True, "cache": "device"}, "the examples lie on the GPU"),
}
# Flash attention takes 16 bits and XLA; a cache needs the pipeline.
_NOT_ALONE = {"flash attention", 'cache="memory"', 'cache="device"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained.

    Attributes:
        name: Of the case.
        techniques: In the order in which they are added.
        net: Makes the compiled model, with XLA or without.
        naive: Makes the dataset that a first script has, with tf.data's own optimisations or without.
        pipeline: Makes the same through `build_pipeline`, with a cache or none.
        batch: Makes one batch, always the same.
        steps, warmup: To time in each turn, and before them.
        tolerance: How far from the naive one's the mean loss of the first ten steps on one batch may be, relatively.
            None: it is not compared, since training diverges from the smallest difference.
    """

    name: str
    techniques: tuple[str, ...]
    net: Callable[[bool | str], keras.Model]
    naive: Callable[[bool], tf.data.Dataset]
    pipeline: Callable[[str | None], tf.data.Dataset]
    batch: Callable[[], Any]
    steps: int
    warmup: int
    tolerance: float | None


def stacked(workload: Workload) -> Case:
    """Everything off, then each technique on top of those before it; Keras' defaults; and the ceiling."""
    way = Way()
    ways = {_NAIVE: way, _DEFAULTS: Way(tf32=True, jit_compile="auto", optimised=True)}
    for name in workload.techniques:
        ways[f"+ {name}"] = way = replace(way, **_TECHNIQUES[name][0])
    return _case(workload, workload.name, "What does each technique add, from a first script on?", ways, ceiling=way)


def alone(workload: Workload) -> Case:
    """Each technique where everything else is off."""
    names = [name for name in workload.techniques if name not in _NOT_ALONE]
    ways = {_NAIVE: Way()} | {f"{name} alone": Way(**_TECHNIQUES[name][0]) for name in names}
    return _case(workload, f"{workload.name}, alone", "What does each technique do by itself?", ways, ceiling=None)


def _case(workload: Workload, name: str, question: str, ways: Mapping[str, Way], *, ceiling: Way | None) -> Case:
    training = _Training(workload)
    variants = [_variant(training, name, way, recommended=way == ceiling) for name, way in ways.items()]
    if ceiling is not None:
        variants.append(_variant(training, "step alone", replace(ceiling, overlap=False), ceiling=True))
    return Case(
        suite="stack",
        workload=name,
        question=question,
        unit="step of fit",
        variants=variants,
        judge=None if workload.tolerance is None else partial(_same_loss, workload.tolerance),
        model=partial(workload.net, False),
    )


def _variant(
    training: "_Training", name: str, way: Way, *, recommended: bool = False, ceiling: bool = False
) -> Variant:
    return Variant(
        name=name,
        note=_note(name),
        timer=partial(training.timer, name, way, ceiling),
        values=None if ceiling else lambda: [training.losses[name]],
        recommended=recommended,
        ceiling=ceiling,
        dtype=way.dtype,
    )


def _note(name: str) -> str:
    notes = {
        _NAIVE: "all off: float32 without TF32, no XLA, nothing parallel or ahead",
        _DEFAULTS: "TF32, XLA and tf.data's optimisations as they are switched on by themselves",
        "step alone": "the ceiling: one batch, on the device",
    }
    return notes.get(name) or _TECHNIQUES[name.removeprefix("+ ").removesuffix(" alone")][1]


class _Training:
    """Trains a workload in several ways, from the same weights.

    Attributes:
        losses: By variant, the mean loss of the first steps on the workload's one batch, where that is compared.
    """

    def __init__(self, workload: Workload):
        self._workload = workload
        self.losses: dict[str, float] = {}

    def timer(self, name: str, way: Way, alone: bool, stack: ExitStack) -> Timer:
        """Makes what times `fit` or, without it, the step alone."""
        workload = self._workload
        keras.utils.set_random_seed(0)
        with precision.policy(way.policy):
            net = workload.net(way.jit_compile)
        if way.flash:
            kernels.use_flash_attention(net)
        if way.overlap:
            fit.overlap(net)
            stack.callback(fit.undo, net)
        if alone:
            timer: StepTimer | FitTimer = StepTimer(net, workload.batch())
        else:
            timer = FitTimer(net, workload.pipeline(way.cache) if way.pipeline else workload.naive(way.optimised))
        if way.flash:
            expect_kernel(net)

        def timed() -> StepTimes:
            with precision.tf32(way.tf32):
                times = timer(workload.steps, warmup=workload.warmup, samples=_SAMPLES)
                if workload.tolerance is not None and isinstance(timer, FitTimer) and name not in self.losses:
                    self.losses[name] = self._loss(net, timer.train_function)
            return times

        return timed

    def _loss(self, net: keras.Model, train_function: Any) -> float:
        with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
            batches = tf.data.Dataset.from_tensors(self._workload.batch()).repeat(_LOSS_STEPS)
        with preserved(net):
            net.train_function = train_function  # or it would be compiled once more
            return float(net.fit(batches, verbose=0, shuffle=False).history["loss"][0])


def _same_loss(tolerance: float, expected: Sequence[float], values: Sequence[float]) -> Check:
    apart = abs(values[0] - expected[0]) / abs(expected[0])
    return Check(
        what=f"mean loss of {_LOSS_STEPS} steps on one batch: within {tolerance:.2%} of {_NAIVE}'s",
        values=tuple(values),
        passed=apart <= tolerance,
        text=f"loss {values[0]:.4f}",
    )
