"""Sums over the replicas, and what they send."""

from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfopt.text import Shown


@dataclass(frozen=True, slots=True, repr=False)
class Compression(Shown):
    """What compressing an optimizer's gradients saves in traffic, per replica."""

    replicas: int
    """Number of replicas that sum their gradients."""
    sent_bytes: int
    """Bytes of dense gradients that each replica sends per update over a ring."""
    uncompressed_sent_bytes: int
    """Bytes that each would send without compression. An embedding's rows, which are not compressed, are left out."""

    def __str__(self) -> str:
        return (
            f"gradients of {self.replicas} replicas: {self.sent_bytes:,} bytes sent per update instead of "
            f"{self.uncompressed_sent_bytes:,}"
        )

    def to_dict(self) -> dict[str, int]:
        """The fields, for JSON."""
        return asdict(self)


class Traffic:
    """Sums a replica's tensors with the others', and counts the bytes that it sends for that.

    Args:
        device: The replica's device.
    """

    def __init__(self, device: str):
        self._device = device
        self._context: Any = tf.distribute.get_replica_context()
        self.replicas: int = self._context.num_replicas_in_sync
        self.sent_bytes = 0
        """Bytes that this replica sends over a ring."""

    def sum(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over the replicas."""
        if not values:
            return []
        self.sent_bytes += summed_bytes(values, self.replicas)
        summed: list[tf.Tensor] = self._context.all_reduce(tf.distribute.ReduceOp.SUM, [self._here(v) for v in values])
        return summed

    def _here(self, value: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device):  # inside a branch a tensor has no device, and TensorFlow needs one
            return tf.identity(value)


def summed_bytes(values: list[tf.Tensor], replicas: int) -> int:
    """Bytes that a replica sends over a ring to sum these tensors: n-1 n-ths of them, twice."""
    return 2 * (replicas - 1) * sum(map(_bytes, values)) // replicas


def _bytes(value: tf.Tensor) -> int:
    return int(value.shape.num_elements() * value.dtype.size)
