"""What examples and batches go through: functions called in turn in one parallel map, and padding of the last batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.pipelines.shared.elements import accepts_seed, apply_stage, element_of, leaves, without_autograph
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions, unmarked
from tfopt.pipelines.shared.seeding import element_seed, with_drawn_bits, with_random_bits

PADDING_NOTE = (
    "by repeating its own examples at weight 0, so that a loss that averages keeps its gradients; not preserved: "
    "reduction='sum', masked means, unweighted metrics, batch-norm statistics, epoch logs (docs/pipelines.md)"
)


@dataclass(frozen=True, slots=True)
class StageFunction:
    """A function that a stage calls on each example, or on each batch."""

    stage: str
    call: Callable[..., Any]  # called as `Dataset.map` calls its function
    seeded: bool = False  # whether it takes a keyword `seed`


def augment_functions(options: PipelineOptions, *, by_batch: bool) -> list[StageFunction]:
    """Returns the functions of `augment` that take single examples, or those that take batches."""
    chosen = [function for function in options.augmentations if isinstance(function, PerBatch) is by_batch]
    return [StageFunction("augment", function, accepts_seed(function)) for function in map(unmarked, chosen)]


# Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
def call_in_turn(functions: Sequence[StageFunction], element: Any, bits: Any, number: int = 0) -> Any:
    """Returns an element after all functions, in a graph.

    Args:
        functions: The functions.
        element: The element, or a batch.
        bits: Random bits for the seeds; None if no function takes a seed.
        number: How many functions with a seed were called before.
    """
    # Counted among the seeded ones, so that other functions do not change their seeds.
    for function in functions:
        keywords = {"seed": element_seed(bits, number)} if function.seeded else {}
        number += function.seeded
        element = apply_stage(function.stage, function.call, element, **keywords)
    return element


def map_functions(
    dataset: Any,
    functions: Sequence[StageFunction],
    seed: int | None,
    *,
    deterministic: bool | None = None,
    check: Callable[[Any, Any], Any] | None = None,
    served: bool = False,
) -> Any:
    """Returns a dataset whose elements have gone through the functions, in one parallel map.

    Args:
        dataset: The elements.
        functions: The functions.
        seed: What the elements' seeds are derived from; None for a random one.
        deterministic: Whether the order is kept. Default: as in the whole pipeline.
        check: Takes an element before and after the functions, and returns the latter.
        served: Whether this runs on the workers of a tf.data service.
    """
    if not functions and check is None:
        return dataset
    spec, seeded = dataset.element_spec, any(function.seeded for function in functions)

    def checked(before: Any, bits: Any) -> Any:
        element = call_in_turn(functions, before, bits)
        return element if check is None else check(before, element)

    def unseeded(*arguments: Any) -> Any:
        return checked(element_of(arguments, spec), None)

    name = "_and_".join(dict.fromkeys(function.stage for function in functions)) or "check"
    elements, call = dataset, unseeded
    if seeded:
        elements, call = with_drawn_bits(dataset) if served else with_random_bits(dataset, seed), checked
    return elements.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic, name=name)


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
    for leaf in leaves(spec):
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
        ValueError: If no weights are given, and the loss may have several values per example.

    Example:
        >>> x, y, weight = pad_batch((tf.constant([1, 2, 3]), tf.constant([0, 1, 0])), 4)
        >>> x.numpy().tolist(), [round(float(value), 3) for value in weight]
        ([1, 2, 3, 1], [1.333, 1.333, 1.333, 0.0])
    """
    if len(batch) == 2:
        for target in leaves(batch[1]):
            _expect_one_loss(target, batch_size)
    flat = leaves(batch)
    count = tf.shape(flat[0])[0]
    rows = tf.range(batch_size)
    filled = tf.cond(
        tf.equal(count, batch_size),
        lambda: flat,
        lambda: [tf.gather(leaf, rows % count) for leaf in flat],
    )
    for before, after in zip(flat, filled, strict=True):
        after.set_shape((batch_size, *before.shape[1:]))
    weight = tf.where(rows < count, tf.cast(batch_size / count, tf.float32), 0.0)
    x, y, *given = tf.nest.pack_sequence_as(batch, filled)
    return x, y, tf.nest.map_structure(lambda own: _weighed(own, weight), given[0]) if given else weight


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


def _weighed(own: Any, weight: Any) -> Any:
    """Multiplies given weights, of shape (batch_size, ...), by those of the examples."""
    return tf.cast(own, tf.float32) * tf.reshape(weight, (-1, *[1] * (own.shape.rank - 1)))
