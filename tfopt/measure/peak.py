"""What a device can do at best: the rate of a large matrix product."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral

import tensorflow as tf

from tfopt.errors import unknown_name
from tfopt.measure.steps import wait

# The dtype that each is kept in.
_STORED = {
    "bfloat16": tf.bfloat16,
    "float16": tf.float16,
    "tensorfloat32": tf.float32,
    "float32": tf.float32,
}
_SIZE_ON_GPU = 8192
_SIZE_ON_CPU = 512
_BLOCKS = 5
_BLOCK_SECONDS = 0.04


def matmul_tflops(
    dtype: str = "bfloat16", size: int | None = None, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measures how many 10¹² operations per second this device does in a large square matrix product.

    Give it to `ThroughputLogger(peak_tflops=…)` where no peak is listed for the device, or to relate a training to what
    the device does under its power limit and at its clocks. Run it while nothing else runs. It takes less than a second
    after compiling, and three matrices of memory and those of the products under way.

    Source: a product of two n×n matrices has 2n³ operations.

    Args:
        dtype: "bfloat16", "float16", "tensorfloat32" (float32 rounded on Tensor Cores, as TensorFlow does unless told
            otherwise) or "float32" (not rounded). A CPU computes the last two alike.
        size: Rows of the matrices. None: 8192 on a GPU, which fills the largest, 512 on a CPU.
        clock: Seconds, monotonic.

    Returns:
        The best of five blocks of products, each with one wait at its end.

    Raises:
        ValueError: An unknown dtype, or `size` is no integer of at least 1.

    Example:
        >>> tfopt.measure.matmul_tflops("bfloat16")
        734.2
    """
    if dtype not in _STORED:
        raise unknown_name("dtype", dtype, _STORED)
    if size is None:
        size = _SIZE_ON_GPU if tf.config.list_logical_devices("GPU") else _SIZE_ON_CPU
    if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
        raise ValueError(f"Expected size to be an integer of at least 1. Received: size={size!r}. Leave it out.")
    with _tf32(dtype == "tensorfloat32"):
        seconds = _best_seconds(_STORED[dtype], int(size), clock)
    return 2 * size**3 / seconds / 1e12


def _best_seconds(dtype: tf.DType, size: int, clock: Callable[[], float]) -> float:
    """Seconds a product, of the best block."""
    # Random numbers: with zeros a GPU draws less power and holds higher clocks (Horace He, "Strangely, Matrix
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


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    """TF32 on or off for a block; `tfopt.precision.tf32` is a floor above."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(enabled)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
