"""From a first script to what tfopt recommends: each technique on top of the others, and each alone.

On a GPU ResNet-50 and GPT-2. On a CPU, which has no Tensor Cores and gains nothing by XLA, photographs and a small net.
All variants of a case start from the same weights.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import keras
import tensorflow as tf

from tfopt import fit, hardware, kernels, precision
from tfopt.bench.cases import Case, Scale, Timer, Variant
from tfopt.bench.cases.kernels import GPT2_BATCH, expect_kernel
from tfopt.bench.results import DEFAULTS, NAIVE, Check
from tfopt.bench.workloads import gpt2, photos
from tfopt.measure import FitTimer, StepTimer, StepTimes, one_batch, preserved
from tfopt.pipelines import build_pipeline

_STEPS, _WARMUP = 12, 6
_SAMPLES = 2  # few and long beside the wait at a sample's end
_LOSS_STEPS = 10
_PHOTOS_BATCH, _PHOTOS_STEPS = 32, 12
_GPT2_BATCHES = 40  # so that no epoch ends while steps are timed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """How a model is trained. By default everything is off, also what TensorFlow and Keras switch on by themselves."""

    tf32: bool = False  # for float32 products
    policy: str = "float32"  # dtype policy
    jit_compile: bool | str = False  # "auto": as Keras decides
    optimised: bool = False  # whether tf.data may optimise the naive input
    pipeline: bool = False  # whether `build_pipeline` feeds it
    cache: str | None = None  # as for `build_pipeline`
    overlap: bool = False
    flash: bool = False  # attention through cuDNN

    @property
    def dtype(self) -> str:
        """Dtype of most matrix products."""
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
    """What is trained."""

    name: str  # of the case
    techniques: tuple[str, ...]  # in the order in which they are added
    net: Callable[[bool | str], keras.Model]  # a compiled model, with XLA or without
    naive: Callable[[bool], tf.data.Dataset]  # what a first script has, with tf.data's own optimisations or without
    pipeline: Callable[[str | None], tf.data.Dataset]  # the same through `build_pipeline`, with a cache or none
    batch: Callable[[], Any]  # always the same
    steps: int  # timed in each turn
    warmup: int  # steps before them
    # How far the mean loss of the first ten steps on one batch may be from the naive one's, relatively. None: it is not
    # compared, since training diverges from the smallest difference.
    tolerance: float | None


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size, those that say most first."""
    if scale.resnet is None:
        return [stacked(_photos(scale.photos))]
    workloads = [_resnet50(scale.resnet), _gpt2()]
    return [*map(stacked, workloads), *map(alone, workloads)]


def _on_gpu(last: str) -> tuple[str, ...]:
    """Techniques that this GPU has."""
    policy = precision.recommend().policy
    ampere = all(gpu.compute_capability is None or gpu.compute_capability >= (8, 0) for gpu in hardware.gpus())
    in_16_bits = policy != "float32"
    names = ["TF32"] * ampere + [policy] * in_16_bits + ["XLA", "build_pipeline", "overlap"]
    return (*names, *[last] * (last != "flash attention" or (ampere and in_16_bits)))


def _resnet50(batch_size: int) -> Workload:
    return _in_memory(
        partial(photos.rows, batch_size),
        batch_size,
        name="resnet50",
        techniques=_on_gpu('cache="device"'),
        net=lambda jit_compile: photos.resnet50(jit_compile=jit_compile),
        tolerance=None,
    )


def _gpt2() -> Workload:
    return _in_memory(
        partial(gpt2.batch, _GPT2_BATCHES * GPT2_BATCH),
        GPT2_BATCH,
        name="gpt2",
        techniques=_on_gpu("flash attention"),
        net=lambda jit_compile: gpt2.model(jit_compile=jit_compile),
        tolerance=0.02,
    )


def _in_memory(make_rows: Callable[[], tuple[Any, Any]], batch_size: int, **fields: Any) -> Workload:
    """A workload whose examples and labels lie in host memory; `fields` are the others of `Workload`."""
    rows = cache(make_rows)
    return Workload(
        naive=cache(lambda optimised: _naive(rows(), batch_size, optimised)),
        pipeline=cache(lambda kept: build_pipeline(rows(), batch_size=batch_size, cache=kept)),
        batch=lambda: tuple(part[:batch_size] for part in rows()),
        steps=_STEPS,
        warmup=_WARMUP,
        **fields,
    )


def _photos(count: int) -> Workload:
    folder = cache(partial(photos.folder, count))

    def pipeline(kept: str | None) -> tf.data.Dataset:
        return build_pipeline(folder(), batch_size=_PHOTOS_BATCH, transform=photos.resized, cache=kept)

    return Workload(
        name="photos",
        techniques=("build_pipeline", 'cache="memory"', "overlap"),
        net=lambda jit_compile: photos.small_net(jit_compile=jit_compile),
        naive=lambda optimised: photos.naive(folder(), _PHOTOS_BATCH, optimised=optimised),
        pipeline=pipeline,
        batch=cache(lambda: one_batch(photos.naive(folder(), _PHOTOS_BATCH))),
        steps=_PHOTOS_STEPS,
        warmup=count // _PHOTOS_BATCH,  # which fills a cache
        tolerance=1e-5,
    )


def _naive(rows: tuple[Any, Any], batch_size: int, optimised: bool) -> tf.data.Dataset:
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(batch_size, drop_remainder=True)
    return dataset if optimised else photos.one_by_one(dataset)


def stacked(workload: Workload) -> Case:
    """Returns the case with everything off, then each technique on top of those before it, beside Keras' defaults."""
    setup = TrainingSetup()
    tf32 = "TF32" in workload.techniques
    setups = {NAIVE: setup, DEFAULTS: TrainingSetup(tf32=tf32, jit_compile="auto", optimised=True)}
    for name in workload.techniques:
        setups[f"+ {name}"] = setup = replace(setup, **_TECHNIQUES[name][0])
    return _case(workload, workload.name, "What does each technique add to a first script?", setups, ceiling=setup)


def alone(workload: Workload) -> Case:
    """Returns the case with each technique while everything else is off."""
    names = [name for name in workload.techniques if name not in _NOT_ALONE]
    setups = {NAIVE: TrainingSetup()} | {f"{name} alone": TrainingSetup(**_TECHNIQUES[name][0]) for name in names}
    return _case(workload, f"{workload.name}, alone", "What does each technique do by itself?", setups, ceiling=None)


def _case(
    workload: Workload, name: str, question: str, setups: Mapping[str, TrainingSetup], *, ceiling: TrainingSetup | None
) -> Case:
    training = _Training(workload)
    variants = [_variant(training, name, setup, recommended=setup == ceiling) for name, setup in setups.items()]
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
    training: "_Training", name: str, setup: TrainingSetup, *, recommended: bool = False, ceiling: bool = False
) -> Variant:
    return Variant(
        name=name,
        note=_note(name),
        techniques=_contents(training.workload, name),
        timer=partial(training.timer, name, setup, ceiling),
        values=None if ceiling else partial(training.loss_of, name, setup),
        recommended=recommended,
        ceiling=ceiling,
        dtype=setup.dtype,
    )


def _contents(workload: Workload, name: str) -> tuple[str, ...]:
    """The techniques that a variant contains."""
    if name.startswith("+ "):
        return workload.techniques[: workload.techniques.index(name.removeprefix("+ ")) + 1]
    return (name.removesuffix(" alone"),) if name.endswith(" alone") and name != "step alone" else ()


def _note(name: str) -> str:
    notes = {
        NAIVE: "all off: float32 without TF32, no XLA, nothing parallel or ahead",
        DEFAULTS: "XLA, tf.data's optimisations and, on a GPU, TF32 as they are switched on by themselves",
        "step alone": "the ceiling: one batch, on the device",
    }
    return notes.get(name) or _TECHNIQUES[name.removeprefix("+ ").removesuffix(" alone")][1]


class _Training:
    """Trains a workload in several setups, from the same weights."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.losses: dict[str, float] = {}  # by variant, the mean of the first steps on the one batch, if compared

    def timer(self, name: str, setup: TrainingSetup, alone: bool, stack: ExitStack) -> Timer:
        """Returns what times `fit`, or the step alone."""
        workload = self.workload
        keras.utils.set_random_seed(0)
        with precision.policy(setup.policy):
            net = workload.net(setup.jit_compile)
        if setup.flash:
            kernels.use_flash_attention(net)
        if setup.overlap:
            fit.overlap(net)
            stack.callback(fit.undo, net)
        if alone:
            timer: StepTimer | FitTimer = StepTimer(net, workload.batch())
        else:
            timer = FitTimer(net, workload.pipeline(setup.cache) if setup.pipeline else workload.naive(setup.optimised))
        if setup.flash:
            expect_kernel(net)

        def timed() -> StepTimes:
            with precision.tf32(setup.tf32):
                times = timer(workload.steps, warmup=workload.warmup, samples=_SAMPLES)
                if workload.tolerance is not None and isinstance(timer, FitTimer) and name not in self.losses:
                    self.losses[name] = self._loss(net, timer.train_function)
            return times

        return timed

    def loss_of(self, name: str, setup: TrainingSetup) -> Sequence[float]:
        """Returns the loss to compare; a case resumed with all its turns trains for it once more."""
        if name not in self.losses:
            with ExitStack() as stack:
                self.timer(name, setup, False, stack)()
        return [self.losses[name]]

    def _loss(self, net: keras.Model, train_function: Any) -> float:
        with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
            batches = tf.data.Dataset.from_tensors(self.workload.batch()).repeat(_LOSS_STEPS)
        with preserved(net):
            net.train_function = train_function  # or it would be compiled once more
            return float(net.fit(batches, verbose=0, shuffle=False).history["loss"][0])


def _same_loss(tolerance: float, expected: Sequence[float], values: Sequence[float]) -> Check:
    apart = abs(values[0] - expected[0]) / abs(expected[0])
    return Check(
        what=f"mean loss of {_LOSS_STEPS} steps on one batch: within {100 * tolerance:g} % of {NAIVE}'s",
        values=tuple(values),
        passed=apart <= tolerance,
        text=f"loss {values[0]:.4f}",
    )
