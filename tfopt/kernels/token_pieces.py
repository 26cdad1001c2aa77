"""A language model's last product and what is computed from its logits, a piece of the tokens at a time.

Each piece also computes its part of the gradients, in the forward pass: they have the size of the hidden states and of
the kernel, not of the logits, and nothing has to be computed again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.kernels.cudnn.support import in_xla

_PIECE_BYTES = 64 * 2**20
# Each piece also reads and writes the whole gradient of the kernel, and is a product with fewer rows: on an H100, 16
# pieces made GPT-2's step 4.5 ms longer. 8 pieces take away 88 % of the logits already.
_MOST_PIECES = 8

Chunks = int | Literal["auto"]
# What is computed from labels (tokens,) and logits (tokens, classes): a number per token.
TokenFunction = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastProduct:
    """How logits follow from hidden states: hidden · kernel + bias, with a soft cap, then casts to other dtypes."""

    kernel: tf.Tensor
    """(width, classes), or (classes, width) if transposed."""
    transposed: bool
    bias: tf.Tensor | None
    """(classes,)."""
    soft_cap: float | None
    """Logits become soft_cap · tanh(logits / soft_cap)."""
    dtypes: tuple[tf.DType, ...]
    """Of the product, then of each cast after it."""

    @property
    def classes(self) -> int:
        """How many logits a token has."""
        return int(self.kernel.shape[0 if self.transposed else 1])

    def logits(self, product: tf.Tensor) -> tf.Tensor:
        """The logits that follow from hidden · kernel."""
        if self.bias is not None:
            product += tf.cast(self.bias, product.dtype)
        if self.soft_cap is not None:
            product = tf.tanh(product / self.soft_cap) * self.soft_cap
        for dtype in self.dtypes[1:]:
            product = tf.cast(product, dtype)
        return product


def in_pieces(
    hidden: tf.Tensor,
    last: LastProduct,
    labels: tf.Tensor,
    functions: Sequence[TokenFunction],
    weights: tf.Tensor | None,
    *,
    chunks: Chunks,
    wide: tf.DType,
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
    """Computes functions of labels and logits for all tokens, without ever holding the logits of all.

    Args:
        hidden: (tokens, width).
        last: The product.
        labels: (tokens,).
        functions: The first is differentiated.
        weights: (tokens,): of each token in the sum to be differentiated. None: there is no gradient.
        chunks: How many pieces, or "auto".
        wide: dtype of the results and of sums over pieces.

    Returns:
        A zero whose gradient is that of Σ weights · functions[0], and the functions' values, (tokens,) each.
    """

    @tf.custom_gradient
    def computed(hidden: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> Any:
        here = replace(last, kernel=kernel, bias=bias[0] if bias else None)
        values, gradients = _loop(hidden, here, labels, functions, weights, chunks, wide)

        @tf.custom_gradient
        def backward(upstream: tf.Tensor, *_: tf.Tensor) -> Any:
            parts = (tf.cast(part, wide) * upstream for part in gradients)
            return [
                tf.cast(part, x.dtype) for part, x in zip(parts, (hidden, kernel, *bias), strict=True)
            ], _no_second_gradient

        return (tf.zeros((), wide), *values), backward

    zero, *values = computed(hidden, last.kernel, *([] if last.bias is None else [last.bias]))
    return zero, tuple(map(tf.stop_gradient, values))


def piece_rows(tokens: tf.Tensor, classes: int, chunks: Chunks) -> tf.Tensor:
    """How many tokens a piece has, but the last one, which may have fewer."""
    if chunks == "auto":
        rows = max(1, _PIECE_BYTES // (4 * classes))
        return _divided(tokens, tf.clip_by_value(_divided(tokens, rows), 1, _MOST_PIECES))
    return _divided(tokens, chunks)


def _loop(
    hidden: tf.Tensor,
    last: LastProduct,
    labels: tf.Tensor,
    functions: Sequence[TokenFunction],
    weights: tf.Tensor | None,
    chunks: Chunks,
    wide: tf.DType,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The functions' values, and the gradients for hidden, kernel and bias."""
    tokens, dtype, width = tf.shape(hidden)[0], last.dtypes[0], hidden.shape[1]
    rows = piece_rows(tokens, last.classes, chunks)
    count = _divided(tokens, rows)
    spare = count * rows - tokens

    def cut(x: tf.Tensor) -> tf.Tensor:
        x = tf.pad(x, [[0, spare], *[[0, 0]] * (x.shape.rank - 1)])
        return tf.reshape(x, [count, rows, *x.shape[1:]])

    def joined(pieces: tf.TensorArray) -> tf.Tensor:
        x = pieces.stack()
        return tf.reshape(x, [-1, *x.shape[2:]])[:tokens]

    def array(dtype: tf.DType, *shape: int) -> tf.TensorArray:
        return tf.TensorArray(dtype, count, element_shape=[None, *shape])

    kernel, hidden, labels = tf.cast(last.kernel, dtype), cut(tf.cast(hidden, dtype)), cut(labels)
    slopes, sums = [], []
    if weights is not None:
        # Of a size near 1: in float16, a mean's weight of 1 / tokens would make gradients vanish here, before they
        # meet the loss scale. A power of 2 rounds nothing.
        scale = _power_of_two(tf.reduce_max(tf.abs(weights)))
        weights = cut(weights / scale)
        slopes = [array(dtype, width)]
        sums = [tf.zeros(x.shape, wide) for x in (last.kernel, last.bias) if x is not None]
    wide_product = _wide_product_in_xla if in_xla() else _wide_product

    def body(piece: tf.Tensor, values: Any, slopes: Any, sums: Any) -> Any:
        rows_hidden, rows_labels = hidden[piece], labels[piece]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            product = tf.matmul(rows_hidden, kernel, transpose_b=last.transposed)
            tape.watch(product)
            logits = last.logits(product)
            found = [functions[0](rows_labels, logits)]
        found += [function(rows_labels, logits) for function in functions[1:]]
        values = [array.write(piece, tf.cast(x, wide)) for array, x in zip(values, found, strict=True)]
        if weights is not None:
            slope = tape.gradient(found[0], product, output_gradients=tf.cast(weights[piece], found[0].dtype))
            slopes = [slopes[0].write(piece, tf.matmul(slope, kernel, transpose_b=not last.transposed))]
            pair = (slope, rows_hidden) if last.transposed else (rows_hidden, slope)
            added = [wide_product(*pair, wide), tf.reduce_sum(tf.cast(slope, wide), 0)]
            sums = [x + more for x, more in zip(sums, added, strict=False)]
        return piece + 1, values, slopes, sums

    _, values, slopes, sums = tf.while_loop(
        lambda piece, *_: piece < count,
        body,
        (0, [array(wide) for _ in functions], slopes, sums),
        parallel_iterations=1,  # or several pieces' logits are alive at a time
    )
    gradients = [tf.cast(x, wide) * scale for x in (*map(joined, slopes), *sums)]
    return [joined(x) for x in values], gradients


def _divided(x: Any, by: Any) -> tf.Tensor:
    """The quotient, rounded up, and at least 1."""
    return tf.maximum(1, -(-x // by))


def _power_of_two(x: tf.Tensor) -> tf.Tensor:
    exponent = tf.floor(tf.math.log(x) / tf.math.log(tf.cast(2, x.dtype)))
    return tf.where(x > 0, tf.pow(tf.cast(2, x.dtype), exponent), 1)


def _wide_product_in_xla(one: tf.Tensor, other: tf.Tensor, wide: tf.DType) -> tf.Tensor:
    """oneᵀ · other of 16-bit numbers, summed and returned in 32 bits; TensorFlow's own kernels do not offer that."""
    return tf.raw_ops.BatchMatMulV3(x=one, y=other, Tout=wide, adj_x=True)


def _wide_product(one: tf.Tensor, other: tf.Tensor, wide: tf.DType) -> tf.Tensor:
    return tf.matmul(tf.cast(one, wide), tf.cast(other, wide), transpose_a=True)


def _no_second_gradient(*upstreams: tf.Tensor) -> NoReturn:
    raise UnsupportedError(
        "Expected gradients of a loss. Found: a gradient of the chunked cross-entropy's gradient, which it does not "
        "offer. Remove the kernel first: tfopt.kernels.undo(model)."
    )
