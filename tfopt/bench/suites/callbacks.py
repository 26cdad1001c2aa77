"""fit with and without tfopt's callbacks: what they cost, and that the weights stay the same."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import keras
import tensorflow as tf

from tfopt.bench.cases import Case, Scale, Timer, Variant, flat_weights, same_values
from tfopt.bench.workloads import digits
from tfopt.callbacks import ReportWriter, ThroughputLogger, UtilizationAlert, UtilizationLogger
from tfopt.measure import FitTimer

_EXAMPLES = 2048  # for the small perceptron


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    """What is trained, and steps timed in each turn."""

    model: Callable[[], keras.Model]
    dataset: Callable[[], tf.data.Dataset]
    steps: int


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size: an ordinary step, and one so short that any cost shows."""
    # More steps than elsewhere, since a callback costs little beside a step.
    ordinary = _Workload(
        model=partial(digits.conv_net, width=scale.width), dataset=partial(_digits, scale), steps=3 * scale.steps
    )
    short = _Workload(
        model=partial(digits.perceptron, width=16, jit_compile=False), dataset=_noise, steps=10 * scale.steps
    )
    return [_case("digits", ordinary), _case("mlp, tiny", short)]


def _case(name: str, workload: _Workload) -> Case:
    notes = {
        "no callback": "fit alone",
        "tfopt's callbacks": "UtilizationLogger at 1 Hz and ThroughputLogger, to files, UtilizationAlert, ReportWriter",
    }
    return Case(
        suite="callbacks",
        workload=name,
        question="What do tfopt's callbacks cost?",
        unit="step of fit",
        variants=[
            Variant(
                name=variant,
                note=note,
                timer=partial(_timer, watched, workload),
                values=partial(_weights, watched, workload),
                gpus=0,  # what reads them is what is measured
            )
            for (variant, note), watched in zip(notes.items(), (False, True), strict=True)
        ],
        judge=same_values("every weight after one epoch, bit for bit", "same weights"),
    )


def _callbacks(stack: ExitStack) -> list[keras.callbacks.Callback]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return [
        UtilizationLogger(folder),
        ThroughputLogger(folder),
        UtilizationAlert("process_memory_mib", above=1e9),
        ReportWriter(folder / "report.html"),
    ]


def _digits(scale: Scale) -> tf.data.Dataset:
    train, _ = digits.data()
    return _batches(tuple(train), scale.batch_size)


def _noise() -> tf.data.Dataset:
    return _batches(digits.perceptron_batch(_EXAMPLES), 8)


def _batches(arrays: tuple[object, ...], batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size, drop_remainder=True).cache()


def _timer(watched: bool, workload: _Workload, stack: ExitStack) -> Timer:
    callbacks = _callbacks(stack) if watched else []
    return partial(FitTimer(workload.model(), workload.dataset(), callbacks=callbacks), workload.steps)


def _weights(watched: bool, workload: _Workload) -> Sequence[float]:
    keras.utils.set_random_seed(0)
    net = workload.model()
    with ExitStack() as stack:
        net.fit(workload.dataset(), verbose=0, shuffle=False, callbacks=_callbacks(stack) if watched else [])
    return flat_weights(net)
