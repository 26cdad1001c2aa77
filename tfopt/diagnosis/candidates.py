"""The causes that are tested: how each is taken away, what shows it, and what to do about it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfopt import kernels, precision, xla
from tfopt.causes import catalogue
from tfopt.causes.catalogue import Cause
from tfopt.diagnosis import remedies, techniques
from tfopt.diagnosis.arms import FitArm, ReduceArm, StepArm, one_replica
from tfopt.diagnosis.findings import NotTested
from tfopt.diagnosis.techniques import Technique
from tfopt.diagnosis.training import Training
from tfopt.errors import TfoptError, UnsupportedError, summarize_error
from tfopt.fit.launching import overlap_of
from tfopt.fit.many_steps import hook_between_steps
from tfopt.measure import StepTimes
from tfopt.model.batches import DEVICE_STAGE, ends_on_device, steps_at_once
from tfopt.model.layers import computing_layers
from tfopt.model.state import trace_train_step
from tfopt.pipelines.device.copying import copy_ahead, is_int32
from tfopt.pipelines.plan import PipelinePlan
from tfopt.precision.layer_policies import is_16_bit
from tfopt.text import figure

NOW, STEP = "now", "the step alone"
_FEWER_BYTES = (
    "import tfopt\ntfopt.distribute.compress_gradients(model)  # sends 16 bits; changes rounding\n"
    "# or gradient_accumulation_steps=4, under tfopt.distribute.strategy()"
)
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cause that may slow the training down."""

    cause: Cause
    arm: Callable[[int], StepTimes]
    """Times so many steps without it."""
    evidence: str
    """What the experiment was."""
    remedy: str = ""
    """What to do, in lines of code; empty: those of the technique."""
    label: str = ""
    """What it is called, if not by the cause's name."""
    technique: Technique | None = None
    """What takes it away; None if only the user can."""
    against: str = NOW
    """The arm that it is compared with; empty if its own arm times the cause itself."""
    tried: Callable[[int], StepTimes] | None = None
    """Times so many steps with the remedy carried out, instead of the cause taken away."""
    at_most: bool = False
    """Whether the remedy may save only a part of it."""
    saved: float = 1.0
    """The share of it that the remedy saves."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.label or self.cause.name

    @property
    def lines(self) -> str:
        """The lines of code that take it away."""
        return self.remedy or (self.technique.lines if self.technique else "")

    @property
    def kind(self) -> str:
        """What `tune` has to be allowed to take it away; empty if only the user can."""
        return self.technique.kind if self.technique else ""


def candidates(training: Training) -> Iterator[Candidate | NotTested]:
    """Yields each cause that may be tested on this training, and those that cannot be, with the reason."""
    yield from _input(training)
    yield from _callbacks(training)
    for find in (_eager, _overlap, _xla, _precision, _kernels, _batch, _communication):
        try:
            yield from find(training)
        except (TfoptError, ValueError, TypeError) as error:
            yield NotTested(_NAMES[find], summarize_error(error))


def _input(training: Training) -> Iterator[Candidate | NotTested]:
    ahead = prefetched(training.data)
    if ahead is not None:
        yield Candidate(
            cause=catalogue.NO_PREFETCH,
            arm=FitArm(training, dataset=ahead),
            evidence="The same training with batches prefetched.",
            technique=techniques.PREFETCH,
        )
    remedy, tried = remedies.slow_input(training), None
    try:
        tried = remedies.tried_input(training)
    except (TfoptError, ValueError, TypeError) as error:
        remedy = remedies.no_line(f"build_pipeline does not take these arrays: {summarize_error(error)}")
    yield Candidate(
        cause=catalogue.INPUT,
        arm=FitArm(training, dataset=training.resident),
        evidence="The same steps on one batch that stays in memory.",
        remedy=remedy,
        tried=tried,
        against=NOW if ahead is None else catalogue.NO_PREFETCH.name,
        at_most=True,
    )
    if not tf.config.list_logical_devices("GPU"):
        yield NotTested(catalogue.COPYING.name, "TensorFlow sees no GPU here")
    elif training.model._distribute_strategy is not None:
        yield NotTested(catalogue.COPYING.name, "a strategy copies batches to its own devices")
    elif not training.model.jit_compile and any(map(is_int32, tf.nest.flatten(training.resident.element_spec))):
        yield NotTested(catalogue.COPYING.name, "a step without XLA takes the int32 parts of a batch from the host")
    elif not _on_device(training):
        yield Candidate(
            cause=catalogue.COPYING,
            arm=FitArm(training, dataset=copied_ahead(training.resident)),
            evidence="The same steps on that batch, copied to the GPU ahead of its step.",
            remedy=f"{techniques.OVERLAP.lines}  # copies batches ahead\n# and send images as uint8",
            against=catalogue.INPUT.name,
        )


def copied_ahead(resident: tf.data.Dataset) -> tf.data.Dataset:
    """A batch that repeats, copied to the GPU ahead of each step."""
    return copy_ahead(resident, "GPU:0", steps=None)


def _on_device(training: Training) -> bool:
    """Whether batches are on the GPU before their step begins."""
    data = training.data
    staged = isinstance(data, tf.data.Dataset) and (ends_on_device(data) or hasattr(data, DEVICE_STAGE))
    return staged or isinstance(data, PipelinePlan) or overlap_of(training.model) is not None


def prefetched(data: Any) -> tf.data.Dataset | None:
    """The dataset with batches prefetched; None if they are already, if TensorFlow does so itself, or if it is none."""
    if not isinstance(data, tf.data.Dataset) or ends_on_device(data) or hasattr(data, DEVICE_STAGE):
        return None
    last, options = data, data.options()
    while type(last).__name__ == "_OptionsDataset":
        last = last._input_dataset
    switches = (
        options.autotune.enabled,
        *(
            getattr(options.experimental_optimization, name)
            for name in ("inject_prefetch", "apply_default_optimizations")
        ),
    )
    if False not in switches or type(last).__name__ == "_PrefetchDataset":
        return None
    return data.prefetch(2)  # AUTOTUNE would be off with autotuning


def callback_names(callbacks: Sequence[keras.callbacks.Callback]) -> dict[keras.callbacks.Callback, str]:
    """A name for each callback: its class's, with a number where there are several."""
    kinds = Counter(type(one).__name__ for one in callbacks)
    seen: Counter[str] = Counter()
    names = {}
    for one in callbacks:
        kind = type(one).__name__
        seen[kind] += 1
        cause = catalogue.PROGRESS_BAR if _is_progress_bar(one) else catalogue.CALLBACK
        names[one] = f"{cause.name} {'' if cause is catalogue.PROGRESS_BAR else kind}".strip()
        if kinds[kind] > 1:
            names[one] += f" {seen[kind]}"
    return names


def _is_progress_bar(callback: keras.callbacks.Callback) -> bool:
    return type(callback) is keras.callbacks.ProgbarLogger


def _callbacks(training: Training) -> Iterator[Candidate]:
    for callback, name in callback_names(training.callbacks).items():
        hooks = [hook for hook in _BATCH_HOOKS if _overrides(callback, hook)]
        if not hooks:
            continue
        arm = FitArm(training, without=[callback])
        if _is_progress_bar(callback):
            yield Candidate(
                cause=catalogue.PROGRESS_BAR,
                label=name,
                arm=arm,
                evidence="The same training without the progress bar.",
                remedy="model.fit(..., verbose=2)  # one line per epoch",
            )
            continue
        remedy, saved = remedies.in_each_batch(training, callback, hooks)
        yield Candidate(
            cause=catalogue.CALLBACK,
            label=name,
            arm=arm,
            evidence="The same training without it.",
            remedy=remedy,
            saved=saved,
        )


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


def _eager(training: Training) -> Iterator[Candidate]:
    switches = {
        "tf.config.run_functions_eagerly(False)": tf.config.functions_run_eagerly(),
        techniques.GRAPH.code: training.model.run_eagerly,
    }
    if any(switches.values()):
        lines = "\n".join(line for line, on in switches.items() if on)
        yield _with(training, techniques.GRAPH, "The same training with the step as a graph.", lines)


def _overlap(training: Training) -> Iterator[Candidate | NotTested]:
    overlapped = overlap_of(training.model) is not None
    if not overlapped:
        techniques.OVERLAP.apply(training.model)()  # raises if it cannot be
        evidence = "The same training with tfopt.fit.overlap, which launches steps without waiting and reads logs late."
        yield _with(training, techniques.OVERLAP, evidence)
    if steps_at_once(training.model) > 1 or training.model.run_eagerly or tf.config.functions_run_eagerly():
        return
    if hook := hook_between_steps(training.callbacks):
        yield NotTested(catalogue.LAUNCHED_ALONE.name, f"{hook} may act between steps")
    elif training.model._distribute_strategy is None:
        launched = _with(training, techniques.LAUNCHES, "The same training with 8 steps in a launch.")
        yield launched if overlapped else replace(launched, against=catalogue.WAITS.name)


def _xla(training: Training) -> Iterator[Candidate | NotTested]:
    model = training.model
    on = not model.jit_compile
    if model.run_eagerly or tf.config.functions_run_eagerly():
        raise UnsupportedError("the model runs eagerly")
    if on:
        found = xla.explain(model, training.resident)
        if found.obstacles:
            raise UnsupportedError(str(found.obstacles[0]))
    if on:
        evidence = "The same training with XLA, which computes the same on this batch."
        yield _with(training, techniques.XLA, evidence)
    else:
        yield _with(training, techniques.NO_XLA, "The same training without XLA.")


def _precision(training: Training) -> Iterator[Candidate | NotTested]:
    model = training.model
    half = any(is_16_bit(layer.dtype_policy) for layer in computing_layers(model))
    recommended = precision.recommend()
    name = recommended.policy
    if half == (name != "float32"):
        if not half:
            yield NotTested(catalogue.FLOAT32.name, recommended.reason)
        return
    if not half:
        report = precision.check(model, training.resident, name)
        if not report.passed:
            raise UnsupportedError(f"{name} is refused: {report.verdict}")
    passes = "" if half else ", which tfopt.precision.check passes"
    yield _with(training, techniques.policy(name), f"The same training under {name}{passes}.")


def _kernels(training: Training) -> Iterator[Candidate | NotTested]:
    for kernel in (techniques.FLASH_ATTENTION, techniques.FUSED_BATCH_NORM):
        paths = [path for path in kernels.explain(training.model).layers if path.kernel == kernel.name]
        if not any("not requested" in str(path.training) for path in paths):
            continue
        if not tf.config.list_logical_devices("GPU"):
            yield NotTested(kernel.cause.name, f"{kernel.name} needs an NVIDIA GPU")
        elif reasons := _obstacles(training, kernel):
            yield NotTested(kernel.cause.name, reasons)
        else:
            yield _with(training, kernel, f"The same training with {kernel.name}.")


def _obstacles(training: Training, kernel: Technique) -> str:
    """What keeps every layer from a kernel; empty if one takes it."""
    with kernel.during(training.model):
        trace_train_step(training.model, training.batch)
        rows = [path.training for path in kernels.explain(training.model).layers if path.kernel == kernel.name]
    return ", ".join(dict.fromkeys(reason for row in rows for reason in row or ())) if all(rows) else ""


def _batch(training: Training) -> Iterator[Candidate | NotTested]:
    model = training.model
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise UnsupportedError("the model runs on several replicas")
    yield Candidate(
        cause=catalogue.SMALL_BATCH,
        arm=StepArm(training, twice=True),
        evidence=f"The step alone on a batch of {2 * training.examples}, counted at half its time.",
        remedy=remedies.larger_batch(training),
        against=STEP,
    )


def _communication(training: Training) -> Iterator[Candidate | NotTested]:
    replicas = training.model.distribute_strategy.num_replicas_in_sync
    if replicas == 1:
        yield NotTested(catalogue.COMMUNICATION.name, "the model runs on one device")
        return
    reduce = ReduceArm(training)
    gradients = f"{figure(reduce.mib)} MiB of gradients over {replicas} replicas"
    alone = one_replica(training)
    if alone is None:
        yield Candidate(
            cause=catalogue.COMMUNICATION,
            arm=reduce,
            evidence=f"The all-reduce of {gradients}, alone; a part of it may run beside the computation.",
            remedy=_FEWER_BYTES,
            against="",
        )
        return
    yield Candidate(
        cause=catalogue.COMMUNICATION,
        arm=alone,
        evidence=f"One replica alone with its share of the batch; together, they reduce {gradients}.",
        remedy=_FEWER_BYTES,
        against=STEP,
        at_most=True,
    )


def _with(training: Training, technique: Technique, evidence: str, remedy: str = "") -> Candidate:
    """The cause that a technique takes away."""
    arm = FitArm(training, changes=[technique.during])
    return Candidate(cause=technique.cause, arm=arm, evidence=evidence, remedy=remedy, technique=technique)


_NAMES = {
    _eager: catalogue.EAGER.name,
    _overlap: catalogue.WAITS.name,
    _xla: "XLA",
    _precision: catalogue.FLOAT32.name,
    _kernels: "kernels",
    _batch: catalogue.SMALL_BATCH.name,
    _communication: catalogue.COMMUNICATION.name,
}
