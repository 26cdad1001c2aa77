"""Checks in the graph for elements that the planner did not look at."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfopt.pipelines.elements import apply, leaves, without_autograph
from tfopt.pipelines.sampling import Shapes
from tfopt.pipelines.sources.source import Source


@without_autograph
def expect_shapes(example: Any, shapes: Shapes, name: Any) -> Any:
    """Gives the leaves of an example these shapes; one that has another at run time fails, and its name is told.

    Args:
        example: The example, in a graph.
        shapes: A shape a leaf; None leaves it as it is.
        name: A scalar string tensor: what to call the example.
    """
    checked = [
        leaf if shape is None or leaf.shape.is_fully_defined() else _expect_shape(leaf, shape, name)
        for leaf, shape in zip(leaves(example), shapes, strict=True)
    ]
    return tf.nest.pack_sequence_as(example, checked)


def namer(source: Source) -> Callable[[Any], Any]:
    """Returns a function from a raw element to what to call it, in a graph."""

    @without_autograph
    def name(raw: Any) -> Any:
        return tf.constant(f"An element of {source.name}") if source.origin is None else apply(source.origin, raw)

    return name


def _expect_shape(leaf: Any, shape: tuple[int, ...], name: Any) -> Any:
    # Compared as text: shapes of unlike rank cannot be compared element by element.
    found = tf.strings.reduce_join(tf.as_string(tf.shape(leaf)), separator=", ")
    expected = ", ".join(map(str, shape))
    remedy = f"), unlike the first, ({expected}). Bring all to one shape in `transform`."
    message = [name, " has shape (", found, remedy]
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(found, expected), [tf.strings.join(message)])]):
        leaf = tf.identity(leaf)
    leaf.set_shape(shape)
    return leaf
