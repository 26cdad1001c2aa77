"""A layer's part of a training step, alone: what it computes, and how long that takes."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt.measure.timers import wait
from tfopt.measure.times import StepTimes
from tfopt.model.step_calls import StepCall, has_gradients

_BLOCK_SECONDS = 0.005
_BLOCKS = 3
_MOST_STEPS = 200


def outputs(calls: Sequence[StepCall], inputs: Sequence[list[Any]]) -> list[Any]:
    """Returns the outputs of calls, in a graph. Nothing is assigned."""
    with keras.StatelessScope():
        results = [call.again(tensors) for call, tensors in zip(calls, inputs, strict=True)]
    return [tensor for tensor in keras.tree.flatten(results) if tf.is_tensor(tensor)]


def outputs_and_gradients(calls: Sequence[StepCall], inputs: Sequence[list[Any]]) -> list[Any]:
    """Returns the outputs of calls, and the gradients that training takes of their inputs and weights, in a graph.

    Nothing is assigned.
    """
    found: list[Any] = []
    with keras.StatelessScope():
        for call, tensors in zip(calls, inputs, strict=True):
            wanted = [x for x, has_gradient in zip(tensors, call.has_gradient, strict=True) if has_gradient]
            with tf.GradientTape() as tape:
                tape.watch(wanted)
                made = [x for x in keras.tree.flatten(call.again(tensors)) if has_gradients(x)]
            sources = wanted + [variable.value for variable in call.layer.trainable_weights]
            # Any gradients of the outputs but constant ones, with which XLA leaves out work.
            gradients = tape.gradient(made, sources, output_gradients=made) if made and sources else []
            found += [*made, *(x for x in gradients if x is not None)]
    return found


class BlockTimer:
    """Times a function in short blocks, for `interleave`; the fastest block is the least disturbed one."""

    def __init__(self, step: Callable[[], Any]):
        self._step = step
        seconds = self._block(3)
        self._steps = max(1, min(_MOST_STEPS, round(_BLOCK_SECONDS / max(seconds, 1e-9))))

    def __call__(self) -> StepTimes:
        """Times some blocks of steps."""
        samples = tuple(1000 * self._block(self._steps) for _ in range(_BLOCKS))
        return StepTimes(repeats_ms=(samples,), steps_per_sample=self._steps, first_step_seconds=0.0)

    def _block(self, steps: int) -> float:
        """Seconds per step."""
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        wait()
        return (time.perf_counter() - started) / steps
