"""The peak rate of a device: that of a large matrix product."""

import math
import time
from collections.abc import Callable

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
}
_SIZE_ON_GPU = 8192
_SIZE_ON_CPU = 2048
_BLOCKS = 5
_BLOCK_SECONDS = 0.04


def matmul_tflops(
    dtype: str = "bfloat16", size: int | None = None, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measures how many TFLOP/s this device reaches in a large square matrix product.

    Pass it to `ThroughputLogger(peak_tflops=…)` if no peak is listed for the device, or to relate training to what the
    device reaches at its present clocks and power limit. Nothing else should run meanwhile. It takes about a second
    after compiling, and memory for three matrices plus the products in flight.

    Source: a product of two n×n matrices has 2n³ operations.

    Args:
        dtype: "bfloat16", "float16", "tensorfloat32" (float32 rounded on Tensor Cores, TensorFlow's default) or
            "float32" (not rounded). A CPU computes the last two identically.
        size: Rows of the matrices. None: 8192 on a GPU, enough for the largest, 2048 on a CPU.
        clock: Seconds, monotonic.

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
        size = _SIZE_ON_GPU if tf.config.list_logical_devices("GPU") else _SIZE_ON_CPU
    size = checks.count("size", size, "Leave it out.")
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(dtype == "tensorfloat32")
    try:
        seconds = _best_seconds(_STORED[dtype], size, clock)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    return 2 * size**3 / seconds / 1e12


def _best_seconds(dtype: tf.DType, size: int, clock: Callable[[], float]) -> float:
    """Seconds per product in the best block."""
    # Random numbers, since with zeros a GPU draws less power and holds higher clocks (Horace He, "Strangely, Matrix
    # Multiplications on GPUs Run Faster When Given 'Predictable' Data!", 2024).
    left, right = (tf.cast(tf.random.stateless_normal((size, size), (seed, 0)), dtype) for seed in (0, 1))
    product = tf.function(tf.matmul, jit_compile=True)

    def seconds(products: int) -> float:
        wait()
        started = clock()
        for _ in range(products):
            product(left, right)
        wait()
        return (clock() - started) / products

    seconds(1)  # compiles
    products = math.ceil(_BLOCK_SECONDS / seconds(1))
    return min(seconds(products) for _ in range(_BLOCKS))
