"""Training steps under a distribution strategy, and the time of its all-reduce."""

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.bench.cases.ceilings import DrawTimer
from tfopt.bench.workloads import digits
from tfopt.measure import FitTimer, StepTimes

WIDTH = 512
REDUCED_BYTES = (0, 4, 2**22)
"""Sizes of the tensors reduced: 0 for the call alone, a small one for the latency, a large one for the bandwidth."""

_BATCHES = 16
_REDUCTIONS = 40


class Training:
    """A perceptron under a strategy, fed with digits that lie in memory.

    Args:
        strategy: Strategy it trains under.
        batch_size: Global batch size.
        by_hand: Whether its steps are a custom loop, as in tf.distribute's guide; else Keras' fit.
    """

    def __init__(self, strategy: tf.distribute.Strategy, batch_size: int, *, by_hand: bool):
        keras.utils.set_random_seed(0)
        self._strategy, self._batch_size = strategy, batch_size
        with strategy.scope():
            self.net = digits.perceptron(width=WIDTH, jit_compile=False)
            self.net.optimizer.build(self.net.trainable_variables)
        images, labels = digits.perceptron_batch(_BATCHES * batch_size)
        batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size, drop_remainder=True)
        self._dataset = batches.repeat()
        self._done = 0
        self._step = self._loop() if by_hand else None

    def train(self, steps: int) -> None:
        """Takes training steps. Each call goes on with the next batch."""
        if self._step is None:
            self.net.fit(self._dataset.skip(self._done), steps_per_epoch=steps, verbose=0, shuffle=False)
            self._done += steps
        else:
            for _ in range(steps):
                self._step()

    @cached_property
    def timer(self) -> Any:
        """Times steps: called with `steps`, `warmup` and `samples`, it returns StepTimes."""
        if self._step is None:
            return FitTimer(self.net, self._dataset)
        return DrawTimer(partial(_without_end, self._step), self._batch_size)

    def weights(self) -> Any:
        """All weights, shape (weights,), float32."""
        return np.concatenate([np.ravel(weight) for weight in self.net.get_weights()])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(weight.nbytes for weight in self.net.get_weights())

    def _loop(self) -> Callable[[], Any]:
        """Returns a function that takes a step."""
        net, batch_size = self.net, self._batch_size
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def step(images: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                value = loss(labels, net(images, training=True)) / batch_size
            net.optimizer.apply(tape.gradient(value, net.trainable_variables), net.trainable_variables)

        train = tf.function(lambda *batch: self._strategy.run(step, args=batch), autograph=False)
        batches = iter(self._strategy.experimental_distribute_dataset(self._dataset))
        return lambda: train(*next(batches))


def reduction_times(strategy: tf.distribute.Strategy) -> dict[int, StepTimes]:
    """Times the all-reduce of a tensor, by its size in bytes; under 0 the call alone. All workers have to call it."""
    return {size: _reduction_timer(strategy, size)(_REDUCTIONS, warmup=3, samples=10) for size in REDUCED_BYTES}


def _reduction_timer(strategy: tf.distribute.Strategy, size: int) -> DrawTimer:
    values = tf.ones((max(1, size // 4),))

    def reduce() -> Any:
        total = tf.distribute.get_replica_context().all_reduce("sum", values) if size else values
        return total[0]  # only one number back to Python

    reduced = tf.function(partial(strategy.run, reduce), autograph=False)
    return DrawTimer(partial(_without_end, reduced), 1)


def _without_end(function: Callable[[], Any]) -> Iterator[Any]:
    return (function() for _ in itertools.count())
