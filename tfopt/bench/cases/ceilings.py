"""What limits a training step from above: how fast input is drawn, and the device's best rates in the same run."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfopt.bench.results import DeviceRates
from tfopt.measure import StepTimes, matmul_tflops
from tfopt.measure.timers import wait

_GIB = 2**30
_BLOCKS, _BLOCK_SECONDS = 5, 0.04


class DrawTimer:
    """Times how long it takes to draw a batch, or the next result of a function.

    Args:
        make: Returns new input: batches without end, or as often as they run out. The device is waited for at the end
            of each sample.
        batch_size: Examples in a batch.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, make: Callable[[], Iterable[Any]], batch_size: int, *, clock: Callable[[], float] = time.perf_counter
    ):
        self._make, self._batch_size, self._clock = make, batch_size, clock
        self._first_step_seconds: float | None = None

    def __call__(self, steps: int, *, warmup: int, samples: int) -> StepTimes:
        """Draws new input from its start; the warm-up uses up what was prepared ahead before the first sample.

        Args:
            steps: Batches to time.
            warmup: Batches before them.
            samples: How many samples to divide them into.
        """
        block = -(-steps // samples)
        started = self._clock()
        batches = self._batches()
        _draw(batches, 1)
        if self._first_step_seconds is None:
            self._first_step_seconds = self._clock() - started
        _draw(batches, warmup)
        marks = [self._clock()]
        for _ in range(samples):
            _draw(batches, block)
            marks.append(self._clock())
        return StepTimes(
            repeats_ms=(tuple((end - start) * 1000 / block for start, end in itertools.pairwise(marks)),),
            steps_per_sample=block,
            first_step_seconds=self._first_step_seconds,
            examples_per_step=self._batch_size,
        )

    def _batches(self) -> Iterator[Any]:
        while True:
            batches = iter(self._make())
            yield next(batches)  # an error for empty input, in place of an endless search
            yield from batches


def _draw(batches: Iterator[Any], number: int) -> None:
    for _ in range(number):
        next(batches)
    wait()


def device_rates(dtypes: Iterable[str]) -> DeviceRates:
    """Measures the rates of a large matrix product in each dtype, as for `matmul_tflops`, and of copies."""
    gpus = tf.config.list_logical_devices("GPU")
    size = _GIB if gpus else _GIB // 16  # larger than any cache
    with tf.device("CPU:0"):
        host = tf.zeros((size // 8,), tf.int64)  # not int32, which TensorFlow leaves on the host
    with tf.device(gpus[0].name if gpus else "CPU:0"):
        device = tf.identity(host)
    copy = tf.function(tf.bitwise.invert, jit_compile=True)

    def to_device() -> Any:
        with tf.device(gpus[0].name):
            return tf.identity(host)

    return DeviceRates(
        matmul_tflops={dtype: matmul_tflops(dtype) for dtype in sorted(dtypes)},
        copy_gib_per_second=2 * size / _GIB / _best_seconds(lambda: copy(device)),
        host_to_device_gib_per_second=size / _GIB / _best_seconds(to_device) if gpus else None,
    )


def _best_seconds(copy: Callable[[], object]) -> float:
    """Seconds per copy, in the best block."""

    def seconds(copies: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(copies):
            copy()
        wait()
        return (time.perf_counter() - started) / copies

    seconds(1)  # compiles
    copies = math.ceil(_BLOCK_SECONDS / seconds(1))
    return min(seconds(copies) for _ in range(_BLOCKS))
