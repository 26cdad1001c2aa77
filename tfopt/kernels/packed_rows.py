"""Attention that stays within a document, for rows that hold several."""

from typing import Any

from keras import ops


def segment_mask(segments: Any, *, causal: bool = True) -> Any:
    """Returns the attention mask of rows that hold several documents: each attends only to itself.

    Pass it as `attention_mask` to `keras.layers.MultiHeadAttention` or `GroupQueryAttention`, for rows that
    `build_pipeline(..., pack=LENGTH)` makes. `use_flash_attention` supports it.

    Args:
        segments: The document of each position, integers (batch, length); 0 is padding. A symbolic tensor of a
            functional model works as well.
        causal: Whether a position attends only to itself and earlier ones.

    Returns:
        Booleans (batch, length, length): whether a position attends to another. Padding attends to nothing.

    Example:
        >>> import numpy as np
        >>> tfopt.kernels.segment_mask(np.array([[1, 1, 2, 0]])).numpy().astype(int).tolist()[0]
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    queries, keys = ops.expand_dims(segments, 2), ops.expand_dims(segments, 1)
    mask = ops.logical_and(ops.equal(queries, keys), ops.greater(keys, 0))  # `==` compares symbolic tensors as objects
    if not causal:
        return mask
    positions = ops.cumsum(ops.ones_like(segments), axis=1)  # the length may be unknown
    earlier = ops.greater_equal(ops.expand_dims(positions, 2), ops.expand_dims(positions, 1))
    return ops.logical_and(mask, earlier)
