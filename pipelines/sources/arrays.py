"""Arrays in memory as a source."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.elements import without_autograph
from tfopt.pipelines.sources.source import Source


def arrays(data: Any) -> Source:
    """Returns the rows of arrays as a source of examples.

    Use it for data that fits into memory. The arrays are copied once, into host memory.

    Args:
        data: A NumPy array or eager tensor, or tuples and dicts of them, nested as the examples shall be. All have
            the same first dimension, the number of examples.

    Returns:
        A source whose examples have the structure of `data`, without the first dimension.

    Raises:
        TypeError: A leaf is no array, or a masked one.
        ValueError: A leaf has no first dimension, or lengths differ.
        PipelineError: There are no examples.

    Example:
        >>> import numpy as np
        >>> arrays((np.zeros((10, 4)), np.zeros(10))).count
        10
    """
    named = list(_leaves(data, "data"))
    count = _common_length(named)
    # Eager constants go to the GPU where there is one; input belongs to the host.
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(tf.identity, tf.nest.map_structure(tf.convert_to_tensor, data))

    @without_autograph
    def rows(index: Any) -> Any:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, index), tensors)

    return Source(name="arrays", dataset=lambda: tf.data.Dataset.range(count), count=count, decode=rows, resident=True)


def _leaves(data: Any, name: str) -> Any:
    """Yields each array with the expression that reaches it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{name}[{key!r}]")
    elif isinstance(data, tuple):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{name}[{index}]")
    elif isinstance(data, np.ma.MaskedArray):
        raise TypeError(
            f"arrays() expects arrays whose every value counts. Received at {name}: a masked array, whose mask would "
            "be lost. Pass .filled(value), and the mask as an array of its own where the model needs it."
        )
    elif isinstance(data, np.ndarray | tf.Tensor):
        yield name, data
    else:
        raise TypeError(
            f"arrays() expects NumPy arrays or tensors in tuples and dicts. Received at {name}: "
            f"{type(data).__name__}. Convert it with np.asarray; ragged and sparse "
            "tensors with tf.data.Dataset.from_tensor_slices(data)."
        )


def _common_length(named: list[tuple[str, Any]]) -> int:
    for name, leaf in named:
        if len(leaf.shape) == 0:
            raise ValueError(
                f"arrays() expects a first dimension, one row an example. Received a scalar at {name}. Pass an array "
                "with a row for each example."
            )
    lengths = {name: int(leaf.shape[0]) for name, leaf in named}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"arrays() expects one common length. Received: {listed}. Pass as many labels as examples.")
    if not any(lengths.values()):
        raise PipelineError(
            f"arrays() expects at least one example. Received: {list(lengths) or 'no array'}, empty. Check what fills "
            "it."
        )
    return next(iter(lengths.values()))
