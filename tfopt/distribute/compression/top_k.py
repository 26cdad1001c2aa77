"""The largest gradients only, with error feedback."""

import math
from dataclasses import dataclass

import tensorflow as tf

from tfopt.checks import number
from tfopt.distribute.compression.traffic import Traffic


@dataclass(frozen=True, slots=True)
class TopK:
    """Sends a fraction of each gradient: its largest elements, and their positions (for `compress_gradients`).

    What a replica does not send, it adds to its next gradient (error feedback). Each element sent takes twice the
    bytes, and each replica sends it to all others, so this pays if the fraction is well below 1 / (number of replicas).
    Source: Stich et al. 2018, "Sparsified SGD with memory", arXiv:1809.07599.

    Args:
        fraction: Above 0, at most 1. At least one element of each weight is sent.

    Raises:
        TypeError: If `fraction` is not a number.
        ValueError: If it is not above 0 and at most 1.

    Example:
        >>> tfopt.distribute.compress_gradients(model, tfopt.distribute.TopK(0.01))
    """

    fraction: float

    def __post_init__(self) -> None:
        remedy = "Give the fraction of elements to send, such as 0.01."
        number("fraction", self.fraction, remedy, above=0)
        if self.fraction > 1:
            raise ValueError(f"Expected fraction to be at most 1. Received: {self.fraction!r}. {remedy}")

    def begin(self, weight: tf.Tensor, seed: int) -> list[tf.Tensor]:
        """What a replica keeps for a weight: the part of its gradients not sent yet."""
        return [tf.zeros_like(tf.reshape(weight, [-1]))]

    def exchange(self, gradients: list[tf.Tensor], kept: list[list[tf.Variable]], traffic: Traffic) -> list[tf.Tensor]:
        """Sums gradients over the replicas, as far as they are sent."""
        places, values, counts = [], [], []
        for gradient, (unsent,) in zip(gradients, kept, strict=True):
            due = tf.reshape(gradient, [-1]) + unsent
            counts.append(math.ceil(self.fraction * due.shape[0]))
            _, place = tf.math.top_k(tf.abs(due), counts[-1], sorted=False)
            places.append(place)
            values.append(tf.gather(due, place))
            unsent.assign(tf.tensor_scatter_nd_update(due, place[:, None], tf.zeros_like(values[-1])))
        everywhere = [tf.split(traffic.gather(tf.concat(each, 0)), counts, axis=1) for each in (places, values)]
        return [
            tf.reshape(_added(place, value, gradient.shape.num_elements()), gradient.shape)
            for place, value, gradient in zip(*everywhere, gradients, strict=True)
        ]


def _added(places: tf.Tensor, values: tf.Tensor, size: int) -> tf.Tensor:
    """Adds one replica's elements after the other's: in the same order everywhere, so that replicas stay equal."""
    total = tf.zeros([size], values.dtype)
    for replica in range(places.shape[0]):
        total = tf.tensor_scatter_nd_add(total, places[replica][:, None], values[replica])
    return total
