"""fit with and without tfopt's loggers: what they cost, and that the weights stay the same."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from tfopt.bench.cases import Case, Scale, Timer, Variant, same_values
from tfopt.bench.workloads import digits
from tfopt.callbacks import ThroughputLogger, UtilizationLogger
from tfopt.measure import FitTimer


def cases(scale: Scale) -> list[Case]:
    """The cases for this size."""
    notes = {"no callback": "fit alone", "tfopt's loggers": "UtilizationLogger at 1 Hz and ThroughputLogger, to files"}
    return [
        Case(
            suite="callbacks",
            workload="digits",
            question="What do the loggers cost?",
            unit="step of fit",
            variants=[
                Variant(
                    name=name,
                    note=note,
                    timer=partial(_timer, logged, scale),
                    values=partial(_weights, logged, scale),
                )
                for (name, note), logged in zip(notes.items(), (False, True), strict=True)
            ],
            judge=same_values("every weight after one epoch, bit for bit", "same weights"),
        )
    ]


def _loggers(stack: ExitStack) -> list[keras.callbacks.Callback]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return [UtilizationLogger(folder), ThroughputLogger(folder)]


def _batches(scale: Scale) -> tf.data.Dataset:
    train, _ = digits.data()
    return tf.data.Dataset.from_tensor_slices(tuple(train)).batch(scale.batch_size, drop_remainder=True).cache()


def _timer(logged: bool, scale: Scale, stack: ExitStack) -> Timer:
    callbacks = _loggers(stack) if logged else []
    timer = FitTimer(digits.model(width=scale.width), _batches(scale), callbacks=callbacks)
    # What a logger costs is small beside a step: more steps than elsewhere.
    return partial(timer, 10 * scale.steps)


def _weights(logged: bool, scale: Scale) -> Sequence[float]:
    keras.utils.set_random_seed(0)
    net = digits.model(width=scale.width)
    with ExitStack() as stack:
        net.fit(_batches(scale), verbose=0, shuffle=False, callbacks=_loggers(stack) if logged else [])
    return [float(value) for weights in net.get_weights() for value in np.ravel(weights)]
