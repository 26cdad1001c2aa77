"""fit with and without tfopt's callbacks: what they cost, and that the weights stay the same."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import keras
import tensorflow as tf

from tfopt.bench.cases import Case, Scale, Timer, Variant, flat_weights, same_values
from tfopt.bench.workloads import digits
from tfopt.callbacks import ReportWriter, ThroughputLogger, UtilizationAlert, UtilizationLogger
from tfopt.measure import FitTimer

_EXAMPLES = 2048  # for the small perceptron


_Model = Callable[[], keras.Model]
_Data = Callable[[], tf.data.Dataset]


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size: an ordinary step, and one so short that any cost shows."""
    # More steps than elsewhere, since a callback costs little beside a step.
    return [
        _case("digits", partial(digits.conv_net, width=scale.width), partial(_digits, scale), 3 * scale.steps),
        _case("mlp, tiny", partial(digits.perceptron, width=16, jit_compile=False), _noise, 10 * scale.steps),
    ]


def _case(name: str, model: _Model, data: _Data, steps: int) -> Case:
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
                timer=partial(_timer, watched, model, data, steps),
                values=partial(_weights, watched, model, data),
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


def _timer(watched: bool, model: _Model, data: _Data, steps: int, stack: ExitStack) -> Timer:
    return partial(FitTimer(model(), data(), callbacks=_callbacks(stack) if watched else []), steps)


def _weights(watched: bool, model: _Model, data: _Data) -> Sequence[float]:
    keras.utils.set_random_seed(0)
    net = model()
    with ExitStack() as stack:
        net.fit(data(), verbose=0, shuffle=False, callbacks=_callbacks(stack) if watched else [])
    return flat_weights(net)
