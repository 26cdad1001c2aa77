"""Gradients in 16 bits."""

from dataclasses import dataclass

import tensorflow as tf

from tfopt.distribute.compression.traffic import Traffic

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Rounding:
    """Sums gradients in a dtype of 16 bits."""

    dtype: str

    def begin(self, weight: tf.Tensor, seed: int) -> list[tf.Tensor]:
        """What a replica keeps for a weight: nothing."""
        return []

    def exchange(self, gradients: list[tf.Tensor], kept: list[list[tf.Variable]], traffic: Traffic) -> list[tf.Tensor]:
        """Sums rounded gradients over the replicas."""
        return traffic.sum([tf.cast(gradient, self.dtype) for gradient in gradients])
