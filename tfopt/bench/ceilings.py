"""What the device does at best, measured in the run whose figures are held against it."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfopt.measure import matmul_tflops
from tfopt.measure.steps import wait

_GIB = 2**30
_BLOCKS, _BLOCK_SECONDS = 5, 0.04


def ceilings(dtypes: Iterable[str]) -> dict[str, Any]:
    """Measures the rates of a large matrix product in each dtype and of copies.

    Args:
        dtypes: As for `matmul_tflops`.

    Returns:
        JSON: `matmul_tflops` by dtype; `copy_gib_per_second`, read and written on the device together;
        `host_to_device_gib_per_second`, out of pageable memory (null without a GPU).
    """
    gpus = tf.config.list_logical_devices("GPU")
    # Larger than any cache.
    size = _GIB if gpus else _GIB // 16
    with tf.device("CPU:0"):
        host = tf.zeros((size // 8,), tf.int64)  # not int32, which TensorFlow leaves on the host
    with tf.device(gpus[0].name if gpus else "CPU:0"):
        device = tf.identity(host)
    copy = tf.function(tf.bitwise.invert, jit_compile=True)

    def to_device() -> Any:
        with tf.device(gpus[0].name):
            return tf.identity(host)

    return {
        "matmul_tflops": {dtype: matmul_tflops(dtype) for dtype in sorted(dtypes)},
        "copy_gib_per_second": 2 * size / _GIB / _best_seconds(lambda: copy(device)),
        "host_to_device_gib_per_second": size / _GIB / _best_seconds(to_device) if gpus else None,
    }


def _best_seconds(copy: Callable[[], object]) -> float:
    """Seconds a copy, of the best block."""

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
