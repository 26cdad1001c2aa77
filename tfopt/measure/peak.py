"""The peak rates of a device: those of a large matrix product, and of a copy of memory."""

import math
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfopt import checks
from tfopt.errors import unknown_name
from tfopt.measure.timers import wait

# The dtype each is stored in.
_STORED = {
    "bfloat16": tf.bfloat16,
    "float16": tf.float16,
    "tensorfloat32": tf.float32,
    "float32": tf.float32,
    "float64": tf.float64,
}
_SIZE_ON_GPU = 8192
_SIZE_ON_CPU = 2048
_COPIED_ON_GPU = 2**30  # bytes, more than any cache holds
_COPIED_ON_CPU = 2**28
_BLOCKS = 5
_BLOCK_SECONDS = 0.04


def matmul_tflops(dtype: str = "bfloat16", size: int | None = None) -> float:
    """Measures how many TFLOP/s this device reaches in a large square matrix product.

    Pass it to `ThroughputLogger(peak_tflops=…)` if no peak is listed for the device, or to relate training to what the
    device reaches at its present clocks and power limit. Nothing else should run meanwhile. It takes about a second
    after compiling, and memory for three matrices plus the products in flight.

    Source: a product of two n×n matrices has 2n³ operations.

    Args:
        dtype: "bfloat16", "float16", "tensorfloat32" (float32 rounded on Tensor Cores, TensorFlow's default), "float32"
            (not rounded; a CPU computes both identically) or "float64".
        size: Rows of the matrices. None: 8192 on a GPU, enough for the largest, 2048 on a CPU.

    Returns:
        The best of five blocks of products, with one wait at the end of each.

    Raises:
        ValueError: If `dtype` is unknown, or `size` is not an integer of at least 1.

    Example:
        >>> tfopt.measure.matmul_tflops("bfloat16")
        734.2
    """
    if dtype not in _STORED:
        raise unknown_name("dtype", dtype, _STORED)
    if size is None:
        size = _SIZE_ON_GPU if _on_gpu() else _SIZE_ON_CPU
    size = checks.count("size", size, "Leave it out.")
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(dtype == "tensorfloat32")
    try:
        seconds = _product_seconds(_STORED[dtype], size)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    return 2 * size**3 / seconds / 1e12


def copy_gib_per_second() -> float:
    """Measures how fast this device reads and writes its memory, which limits element-wise work.

    Nothing else should run meanwhile. It takes about a second, and 2 GiB of a GPU's memory or 0.5 GiB of a CPU's.

    Source: each element of a large array is read, and written to another one, so twice the array's bytes are moved.

    Returns:
        GiB per second, read and written, in the best of five blocks of copies.

    Example:
        >>> tfopt.measure.copy_gib_per_second()
        3021.4
    """
    size = _COPIED_ON_GPU if _on_gpu() else _COPIED_ON_CPU
    values = tf.ones([size // 4], tf.float32)
    seconds = best_seconds(tf.function(lambda: -values, jit_compile=True))
    return 2 * size / seconds / 2**30


def _on_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _product_seconds(dtype: tf.DType, size: int) -> float:
    """Seconds per product in the best block."""
    # Random numbers, since with zeros a GPU draws less power and holds higher clocks (Horace He, "Strangely, Matrix
    # Multiplications on GPUs Run Faster When Given 'Predictable' Data!", 2024).
    left, right = (tf.cast(tf.random.stateless_normal((size, size), (seed, 0)), dtype) for seed in (0, 1))
    product = tf.function(tf.matmul, jit_compile=True)
    return best_seconds(lambda: product(left, right))


def best_seconds(run: Callable[[], Any]) -> float:
    """Returns the seconds per run in the best of five blocks, after a first run."""

    def seconds(runs: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(runs):
            run()
        wait()
        return (time.perf_counter() - started) / runs

    seconds(1)  # compiles
    runs = math.ceil(_BLOCK_SECONDS / seconds(1))
    return min(seconds(runs) for _ in range(_BLOCKS))
