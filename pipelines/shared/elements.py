"""Elements of a dataset: calls functions on them, measures them, and fills up batches of them."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def without_autograph(function: Function) -> Function:
    """Marks one of tfopt's own functions for AutoGraph to skip. It must not call a user's function."""
    marked: Function = tf.autograph.experimental.do_not_convert(function)
    return marked


def apply(function: Callable[..., Any], element: Any, **keywords: Any) -> Any:
    """Calls a function on an element as `Dataset.map` does: a tuple is spread over the arguments."""
    return function(*element, **keywords) if type(element) is tuple else function(element, **keywords)


# Not marked do_not_convert: AutoGraph must reach the user's function, as in Dataset.map.
def apply_stage(stage: str, function: Callable[..., Any], element: Any, **keywords: Any) -> Any:
    """Calls a stage's function on an element, under the stage's name in the graph."""
    with tf.name_scope(stage):
        return apply(function, element, **keywords)


def element_of(arguments: tuple[Any, ...], spec: Any) -> Any:
    """Returns the element that `Dataset.map` spread over these arguments, given the dataset's element spec."""
    return arguments if type(spec) is tuple else arguments[0]


def in_single_examples(batches: Any, name: str | None = None) -> Any:
    """Returns the dataset of the examples in a dataset of batches."""
    spec = batches.element_spec
    leaves = tf.nest.flatten(spec)
    if all(isinstance(leaf, tf.TensorSpec) and leaf.shape[1:].num_elements() for leaf in leaves):
        return batches.unbatch(name)  # sets up no function

    @without_autograph
    def spread(*batch: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(element_of(batch, spec))

    # TensorFlow 2.21 never ends a flat_map on a tf.data service, and its unbatch crashes on rows without values.
    return batches.interleave(spread, cycle_length=1, name=name)


def size_bytes(element: Any) -> int:
    """Returns the memory an eager element takes; strings count their bytes."""
    return sum(_tensor_bytes(tensor) for tensor in tf.nest.flatten(element, expand_composites=True))


def first_line(error: BaseException) -> str:
    """Returns the message of a TensorFlow error without names of functions and nodes."""
    text = re.sub(r"\{\{[^}]*\}\}", "", str(error)).strip()
    if not text:
        return type(error).__name__
    line = re.sub(r"^Error in user-defined function passed to .*?: Iterator::\S+: ", "", text.splitlines()[0])
    return re.sub(r"\s*\[Op:\w+\].*", "", line).strip().rstrip(".")


def is_static(spec: Any) -> bool:
    """Whether every dense tensor of elements of this spec has a fully known shape."""
    dense = [leaf for leaf in tf.nest.flatten(spec) if isinstance(leaf, tf.TensorSpec)]
    return all(leaf.shape.is_fully_defined() for leaf in dense)


def expect_lengths(spec: Any, *, bucket: bool) -> None:
    """Refuses examples that cannot be padded to one length.

    Raises:
        ValueError: If a part is ragged, sparse or of unknown rank; or for `bucket`, none or another axis than the first
            varies.
    """
    option = "bucket=True" if bucket else "pad='batch'"
    leaves = tf.nest.flatten(spec)
    for leaf in leaves:
        if not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None:
            raise ValueError(
                f"{option} expects dense tensors of known rank. Found {leaf}. Make them dense in `transform`, such as "
                "with tf.ensure_shape(part, (None,))."
            )
        if bucket and not leaf.shape[1:].is_fully_defined():
            raise ValueError(
                f"bucket=True expects the length to be the first axis. Found {leaf}, of which others vary. Fix them "
                "in `transform`, or pass pad='batch' alone."
            )
    if bucket and is_static(spec):
        raise ValueError(
            f"bucket=True expects examples of different lengths before `augment`. Found {spec}, of one shape. Pass "
            "pad='batch' in place of `bucket`, or leave it out."
        )


def expect_paddable(spec: Any) -> None:
    """Refuses examples, or batches of them, that `pad_batch` cannot fill or weight.

    Args:
        spec: The element spec.

    Raises:
        ValueError: If they are not `(x, y)` or `(x, y, sample_weight)`, or hold tensors that are ragged, sparse or of
            unknown rank.
    """
    if type(spec) is not tuple or len(spec) not in (2, 3):
        raise ValueError(
            "remainder='pad' expects examples (x, y) or (x, y, sample_weight): it marks the filling by sample weights. "
            f"Found {spec}. Return such a tuple from `transform`, or pass remainder='keep' or 'drop'."
        )
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None:
            raise ValueError(
                f"remainder='pad' expects dense tensors of known rank. Found {leaf}. Make them dense in `transform`, "
                "such as with tf.ensure_shape or .to_tensor(shape=...), or pass remainder='keep' or 'drop'."
            )


@without_autograph
def pad_batch(batch: Any, batch_size: int) -> Any:
    """Fills a batch by repeating its own examples in turn, and weights them, in a graph.

    Each of k examples gets the weight `batch_size / k`, the filling zero. Examples are repeated rather than zeros
    added, because a weight of zero does not remove a NaN, which a loss may have at zeros.

    Args:
        batch: `(x, y)` or `(x, y, sample_weight)` of 1 to `batch_size` examples; `expect_paddable` has seen its spec.
        batch_size: Examples in a full batch.

    Returns:
        `(x, y, sample_weight)` of `batch_size` examples; x and y of a full batch are not copied. `sample_weight` is
        float32, shape (batch_size,); given weights, of shape (batch_size, ...), are multiplied.

    Raises:
        ValueError: If no weights are given, and the loss may have several values per example; or there are more
            examples.

    Example:
        >>> x, y, weight = pad_batch((tf.constant([1, 2, 3]), tf.constant([0, 1, 0])), 4)
        >>> x.numpy().tolist(), [round(float(value), 3) for value in weight]
        ([1, 2, 3, 1], [1.333, 1.333, 1.333, 0.0])
    """
    if len(batch) == 2:
        for target in tf.nest.flatten(batch[1]):
            _expect_one_loss(target, batch_size)
    flat = tf.nest.flatten(batch)
    # Where the size is known, without a branch: XLA on a GPU gets the shape of uint8 wrong that comes out of one.
    count = at_most(
        batch_size, flat[0].shape[0] or tf.shape(flat[0])[0], "remainder='pad' (else pass remainder='keep' or 'drop')"
    )
    rows = tf.range(batch_size)

    def repeated() -> list[Any]:
        return [tf.gather(leaf, rows % count) for leaf in flat]

    if isinstance(count, int):
        filled = flat if count == batch_size else repeated()
    else:
        filled = tf.cond(tf.equal(count, batch_size), lambda: flat, repeated)
    for before, after in zip(flat, filled, strict=True):
        after.set_shape((batch_size, *before.shape[1:]))
    weight = tf.where(rows < count, tf.cast(batch_size / count, tf.float32), 0.0)
    x, y, *given = tf.nest.pack_sequence_as(batch, filled)
    return x, y, tf.nest.map_structure(lambda own: _weighed(own, weight), given[0]) if given else weight


def _tensor_bytes(tensor: Any) -> int:
    if tensor.dtype == tf.string:
        return sum(map(len, tensor.numpy().ravel().tolist())) if tensor.shape.rank else len(tensor.numpy())
    return int(tensor.dtype.size) * int(tensor.shape.num_elements())


def _expect_one_loss(target: Any, batch_size: int) -> None:
    """Refuses targets for which Keras would apply the weights of examples to steps or rows."""
    # Keras refuses loss values of shape (batch, steps) times weights of shape (batch,) or, with as many steps as
    # examples, silently computes a different loss. Most targets of rank 2 have one loss value per example.
    if target.shape.rank > 2 or (target.shape.rank == 2 and batch_size > 1 and target.shape[1] in (None, batch_size)):
        raise ValueError(
            "remainder='pad' expects targets with one loss an example, or sample weights of the shape of the loss. "
            f"Found targets of shape {target.shape} with batch_size={batch_size}, and no weights. Return (x, y, "
            "sample_weight) from `transform`: weight tf.ones(()) for one loss an example, tf.ones((steps,)) for one a "
            "step; or pass remainder='keep' or 'drop'."
        )


def at_most(most: int, count: Any, what_for: str) -> Any:
    """Returns the number of examples in a batch; fails, in a graph when it runs, if a function has added some."""
    text = (
        f"Expected an `augment` that returns no more than the {most} examples of a batch, for {what_for}. Found {{}}, "
        "of which some would be left out."
    )
    if isinstance(count, int):
        if count > most:
            raise ValueError(text.format(count))
        return count
    with tf.control_dependencies([tf.debugging.Assert(count <= most, [tf.strings.format(text, count)])]):
        return tf.identity(count)


def _weighed(own: Any, weight: Any) -> Any:
    """Multiplies given weights, of shape (batch_size, ...), by those of the examples."""
    return tf.cast(own, tf.float32) * tf.reshape(weight, (-1, *[1] * (own.shape.rank - 1)))


def dense(dataset: Any) -> Any:
    """Returns a dataset whose elements hold no ragged tensors without a ragged axis, as slices of ragged ones are.

    These are dense tensors that only their spec calls ragged.
    """
    leaves = tf.nest.flatten(dataset.element_spec)
    if not any(isinstance(leaf, tf.RaggedTensorSpec) and not leaf.ragged_rank for leaf in leaves):
        return dataset
    spec = dataset.element_spec
    return dataset.map(without_autograph(lambda *element: element_of(element, spec)), name="dense")
