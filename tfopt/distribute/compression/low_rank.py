"""Products of two thin matrices instead of gradients, with error feedback (PowerSGD)."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfopt.checks import integer
from tfopt.distribute.compression.traffic import Traffic


@dataclass(frozen=True, slots=True)
class LowRank:
    """Sends each gradient as a product of two thin matrices (for `compress_gradients`): PowerSGD.

    For a gradient of n rows and m columns, `rank * (n + m)` numbers are sent instead of `n * m`. What the product
    lacks, a replica adds to its next gradient (error feedback). All axes but the last are rows. Biases and other small
    weights are sent whole. Source: Vogels et al. 2019, "PowerSGD", arXiv:1905.13727, algorithms 1 and 2.

    Args:
        rank: Columns of the thin matrices, from 1. Usually 1 to 4.

    Raises:
        TypeError: If `rank` is not an integer.
        ValueError: If it is below 1.

    Example:
        >>> tfopt.distribute.compress_gradients(model, tfopt.distribute.LowRank(4))
    """

    rank: int

    def __post_init__(self) -> None:
        integer("rank", self.rank, "Give the number of columns, such as 4.", least=1)

    def begin(self, weight: tf.Tensor, seed: int) -> list[tf.Tensor]:
        """What a replica keeps for a weight: the part of its gradients not sent yet, and the last right matrix."""
        shape = self._matrix(weight.shape)
        if shape is None:
            return []
        right = tf.random.stateless_normal(
            [shape[1], self.rank], [seed, 0], dtype=weight.dtype
        )  # the same in all replicas
        return [tf.zeros(shape, weight.dtype), right]

    def exchange(self, gradients: list[tf.Tensor], kept: list[list[tf.Variable]], traffic: Traffic) -> list[tf.Tensor]:
        """Sums gradients over the replicas, as far as the products hold them."""
        factored = [at for at, variables in enumerate(kept) if variables]
        whole = [at for at, variables in enumerate(kept) if not variables]
        due = [tf.reshape(gradients[at], kept[at][0].shape) + kept[at][0] for at in factored]
        products = [tf.matmul(matrix, kept[at][1]) for at, matrix in zip(factored, due, strict=True)]
        sums = traffic.sum([*products, *(gradients[at] for at in whole)])
        lefts = [tf.linalg.qr(product)[0] for product in sums[: len(factored)]]
        own = [tf.matmul(matrix, left, transpose_a=True) for matrix, left in zip(due, lefts, strict=True)]
        found = dict(zip(whole, sums[len(factored) :], strict=True))
        for at, left, part, matrix, right in zip(factored, lefts, own, due, traffic.sum(own), strict=True):
            kept[at][0].assign(matrix - tf.matmul(left, part, transpose_b=True))
            kept[at][1].assign(right)
            found[at] = tf.reshape(tf.matmul(left, right, transpose_b=True), gradients[at].shape)
        return [found[at] for at in range(len(gradients))]

    def _matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """A weight's rows and columns; None if two thin matrices would take no less."""
        if len(shape) < 2:
            return None
        columns = int(shape[-1])
        rows = int(tf.TensorShape(shape).num_elements()) // columns
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None
