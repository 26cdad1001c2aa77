"""TF32, the 19-bit format in which Tensor Cores multiply float32 numbers, on or off."""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


def set_tf32(enabled: bool) -> None:
    """Lets float32 products run in TF32, or not, for the rest of the process.

    TensorFlow has TF32 on from the start. GPUs of compute capability 8.0 (Ampere) and later then round the inputs of
    float32 matrix products and convolutions from 23 to 10 bits of mantissa; they keep float32's range, and the sums
    stay in float32. Other devices and dtypes compute as before. Switch it off where float32 must mean float32, such as
    for a reference that 16-bit training is compared with; it is much slower. The environment variable
    NVIDIA_TF32_OVERRIDE=0 switches it off in NVIDIA's libraries whatever is set here.

    Source: TensorFlow, `tf.config.experimental.enable_tensor_float_32_execution`; NVIDIA, "TensorFloat-32 in the A100
    GPU Accelerates AI Training, HPC up to 20x" and the CUDA libraries' notes on NVIDIA_TF32_OVERRIDE.

    Args:
        enabled: Whether TF32 may be used.

    Raises:
        TypeError: `enabled` is no bool.

    Example:
        >>> tfopt.precision.set_tf32(False)
    """
    if not isinstance(enabled, bool):
        raise TypeError(
            f"Expected enabled to be True or False. Received: enabled={enabled!r}. Pass False where float32 must mean "
            "float32."
        )
    tf.config.experimental.enable_tensor_float_32_execution(enabled)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Lets float32 products run in TF32, or not, for a block of code, and puts back what was there.

    The switch belongs to the process, not to the thread. Set it before the first step: whether a step that XLA has
    compiled already follows it is not measured.

    Args:
        enabled: As for `set_tf32`.

    Raises:
        TypeError: `enabled` is no bool.

    Example:
        >>> with tfopt.precision.tf32(False):
        ...     reference = model(inputs)
    """
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    set_tf32(enabled)
    try:
        yield
    finally:
        set_tf32(before)
