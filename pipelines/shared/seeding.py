"""Orders and random bits that follow from a key: shuffles, permutations, and the seeds of single elements."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.shared.elements import apply_stage, element_of, in_single_examples, without_autograph
from tfopt.pipelines.shared.options import StageFunction

PARTS = ("files", "shuffle", "augment", "crop", "batch", "mix")
_IN_BATCHES = "_tfopt_in_batches"


def part_seed(seed: int | None, part: str) -> int | None:
    """Returns the seed of one of `PARTS`, independent of the others'; None stays None."""
    if seed is None:
        return None
    # SeedSequence is stable across NumPy versions; 31 bits, since TensorFlow stores some seeds as int32.
    return int(np.random.SeedSequence((seed, PARTS.index(part))).generate_state(1)[0] >> 1)


def mixed_seed(seed: int | None, number: int) -> int | None:
    """Returns the seed of a part of a mixture, by its number; None stays None."""
    if seed is None:
        return None
    return int(np.random.SeedSequence((seed, len(PARTS), number)).generate_state(1)[0] >> 1)


def shuffle(dataset: Any, buffer: Any, key: Any) -> Any:
    """Returns a dataset shuffled by a key; the order depends on nothing else, not even on `tf.random.set_seed`.

    Dataset.shuffle would mix `tf.random.set_seed` into its seed, so that a second model in the process would see
    another order.
    """
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=tf.cast(buffer, tf.int64),
        seed=key[0],
        seed2=key[1],
        reshuffle_each_iteration=False,
        **dataset._flat_structure,
    )
    shuffled = _variant_of(variant, dataset)
    return shuffled.with_options(dataset.options()) if tf.executing_eagerly() else shuffled


def shuffle_anew(dataset: Any, buffer: int) -> Any:
    """Returns a dataset shuffled by a seed that each process draws for each epoch.

    A dataset that runs on another machine is rebuilt for each epoch, and would otherwise repeat its order.
    """
    zero = tf.constant(0, tf.int64)
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=tf.constant(buffer, tf.int64),
        seed=zero,
        seed2=zero,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=True,
        **dataset._flat_structure,
    )
    return _variant_of(variant, dataset).with_options(dataset.options())


def either(condition: Any, one: Any, other: Any) -> Any:
    """Returns one dataset or the other, in a graph."""
    to_variant = tf.data.experimental.to_variant
    return _variant_of(tf.cond(condition, lambda: to_variant(one), lambda: to_variant(other)), one)


def permutation(count: int, key: Any, *, skipped: Any = 0) -> Any:
    """Returns a dataset of the numbers below `count` in a random order, drawn at once.

    That takes 20 ms for 1.28 million numbers, and 6.4 s with Dataset.shuffle. It holds 8 bytes a number, and leaves out
    the first `skipped` ones. `in_batches` gives many at once.
    """
    drawn = tf.numpy_function(partial(permuted, count), [key], tf.int64, stateful=False)
    numbers = tf.ensure_shape(drawn, [count])[skipped:]
    return from_batches(tf.data.Dataset.from_tensors(numbers), tf.size(numbers, tf.int64))


def permuted(count: int, key: Any) -> Any:
    """Returns the numbers below `count` in the order that a key gives: int64 (count)."""
    # NumPy keeps RandomState as it is, so that the order is that of all versions.
    return np.random.RandomState(key.view(np.uint32)).permutation(count)


def bits_from(first: int, count: int, key: Any) -> Any:
    """Returns the random bits of `count` elements from the place `first` on: int64 (count), in [0, 2**32)."""
    block, within = divmod(first, 4)
    generator = np.random.Philox(key=key.view(np.uint64), counter=block)
    return (generator.random_raw(within + count)[within:] >> np.uint64(32)).astype(np.int64)


def from_batches(batches: Any, count: Any) -> Any:
    """Returns the dataset of the `count` elements in batches of any length; None if it is unknown, or may be less.

    `in_batches` makes others of these, with no step per element.
    """

    def cut(size: int | None, *, full: bool = False) -> Any:
        made = in_single_examples(batches) if size is None else _rebatched(batches, size, full=full)
        if count is None:
            return made
        return made.apply(tf.data.experimental.assert_cardinality(steps_of(count, size or 1, full=full)))

    return many_at_once(cut)


def _rebatched(batches: Any, size: int, *, full: bool) -> Any:
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(batches.element_spec)):
        return batches.rebatch(size, drop_remainder=full)
    # Dataset.rebatch maps a function over them, too, which would make dense tensors of others.
    spec = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec((size if full else None, *leaf.shape[1:]), leaf.dtype), batches.element_spec
    )
    variant = tf.raw_ops.RebatchDatasetV2(
        input_dataset=tf.data.experimental.to_variant(batches),
        batch_sizes=[tf.constant(size, tf.int64)],
        drop_remainder=full,
        output_types=[leaf.dtype for leaf in tf.nest.flatten(spec)],
        output_shapes=[leaf.shape for leaf in tf.nest.flatten(spec)],
    )
    made = tf.data.experimental.from_variant(variant, spec)
    made._inputs = lambda: [batches]  # as in `shuffle`
    return made


def sequence(count: int, *, skipped: Any = 0) -> Any:
    """Returns a dataset of the numbers below `count` in their order, without the first `skipped` ones.

    `in_batches` gives many at once.
    """
    skipped = min(skipped, count) if isinstance(skipped, int) else tf.minimum(skipped, count)

    def counted(size: int | None, *, full: bool = False) -> Any:
        if size is None:
            return tf.data.Dataset.range(skipped, count)
        tail = (count - skipped) % size

        @without_autograph
        def batch(first: Any) -> Any:
            return first + tf.range(size, dtype=tf.int64)

        batches = tf.data.Dataset.range(skipped, count - tail, size).map(batch)
        return batches if full else batches.concatenate(_whole(tf.range(count - tail, count, dtype=tf.int64), tail))

    return many_at_once(counted)


def in_batches(dataset: Any, size: int, *, full: bool) -> Any:
    """Returns a dataset in batches; `full` leaves out a smaller last one.

    Elements straight from `permutation`, `sequence` or `from_batches` are cut into batches, with no step per element.
    """
    made = getattr(dataset, _IN_BATCHES, None)
    return dataset.batch(size, drop_remainder=full, name="batch") if made is None else made(size, full=full)


def renumbered(dataset: Any, function: Callable[[Any], Any]) -> Any:
    """Returns numbers after a function of each or of many at once; `in_batches` still gives many at once."""
    numbers, made = dataset.map(function), getattr(dataset, _IN_BATCHES, None)
    if made is not None:
        setattr(numbers, _IN_BATCHES, lambda size, full: made(size, full=full).map(function))
    return numbers


def in_turns(turns: Any, datasets: Sequence[Any]) -> Any:
    """Returns a dataset whose elements come from these datasets in turn, up to the first that has none left.

    All of them begin on each iteration. `turns` is a dataset of their numbers.
    """
    # Dataset.choose_from_datasets copies the turns, and the copy begins again once they are garbage.
    variant = tf.raw_ops.DirectedInterleaveDataset(
        selector_input_dataset=tf.data.experimental.to_variant(turns),
        data_input_datasets=[tf.data.experimental.to_variant(dataset) for dataset in datasets],
        stop_on_empty_dataset=True,
        **datasets[0]._flat_structure,
    )
    chosen = tf.data.experimental.from_variant(variant, datasets[0].element_spec)
    chosen._inputs = lambda: [turns, *datasets]  # as in `shuffle`
    return chosen


def of_length(dataset: Any, length: int | None, *, ends: bool = False) -> Any:
    """Returns a dataset that says this of its length, None for unknown, and may end before.

    `ends` has it ask for the end of the data. For batches: what it does takes too long for each example.
    """
    turns = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
    if length is None:
        return in_turns(turns, [dataset])
    # TensorFlow takes a choice for endless if one of its datasets is. This one is never read; assert_cardinality would
    # raise an error at the end of a shorter iteration.
    endless = dataset.take(0).apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    chosen = in_turns(turns, [dataset, endless])
    if length == tf.data.INFINITE_CARDINALITY:
        return chosen
    if not ends:
        return chosen.take(length)
    # TensorFlow does not run a function that only passes on what it is given.
    numbered = tf.data.Dataset.zip(chosen, tf.data.Dataset.range(length))
    return numbered.map(without_autograph(lambda element, _: element))


def with_random_bits(dataset: Any, key: Any, *, skipped: Any = 0) -> Any:
    """Pairs each element with the random bits `element_seed` makes its seed from: `(element, bits)`."""
    return tf.data.Dataset.zip(dataset, bits_of(key, skipped=skipped))


def bits_of(key: Any, *, skipped: Any = 0) -> Any:
    """Returns an endless dataset of the random bits of single elements, from the place `skipped` on.

    The bits depend on the key and an element's place in the epoch, not on its content, so that parallelism changes
    nothing.
    """
    spec = tf.TensorSpec((), tf.int64)
    shapes = {"output_types": [spec.dtype], "output_shapes": [spec.shape]}
    variant = tf.raw_ops.RandomDataset(seed=key[0], seed2=key[1], **shapes)
    bits = tf.data.experimental.from_variant(variant, spec)
    return bits if isinstance(skipped, int) and not skipped else bits.skip(skipped)


def random_bits(key: Any) -> Any:
    """Returns the number in [0, 2**32) that a key gives to a generator of NumPy."""
    return tf.bitwise.bitwise_and(key[0], 2**32 - 1)


def with_drawn_bits(dataset: Any) -> Any:
    """Does the same with one independent draw per element, so that parts may run on many machines.

    Nothing makes these bits repeatable.
    """
    spec = dataset.element_spec

    @without_autograph
    def with_bits(*arguments: Any) -> Any:
        # Seeds of zero, not None: tf.random.set_seed would replace None.
        bounds = tf.constant(0, tf.int64), tf.constant(2**32, tf.int64)
        bits = tf.raw_ops.RandomUniformInt(shape=tf.zeros(0, tf.int32), minval=bounds[0], maxval=bounds[1])
        return element_of(arguments, spec), bits

    return dataset.map(with_bits, name="random_bits")


@without_autograph
def element_seed(bits: Any, number: int = 0) -> Any:
    """Returns an int32 seed of shape (2,) for one element of one epoch.

    Args:
        bits: As `with_random_bits` gives them.
        number: Tells several uses of the same bits apart.
    """
    # Few operations: they run for each element. Bits lie in [0, 2**32), the number in the upper half.
    return tf.bitcast(bits if number == 0 else tf.bitwise.bitwise_or(bits, number * 2**32), tf.int32)


# Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
def call_in_turn(functions: Sequence[StageFunction], element: Any, bits: Any, number: int = 0) -> Any:
    """Returns an element or a batch after all functions, in a graph.

    `bits` may be None if no function takes a seed; `number` functions that take one were called before.
    """
    # Counted among the seeded ones, so that other functions do not change their seeds.
    for function in functions:
        keywords = {"seed": element_seed(bits, number)} if function.seeded else {}
        number += function.seeded
        element = apply_stage(function.stage, function.call, element, **keywords)
    return element


def many_at_once(made: Callable[..., Any]) -> Any:
    """Returns the dataset that a function makes without a size, of which `in_batches` gives many elements at once."""
    dataset = made(None)
    setattr(dataset, _IN_BATCHES, made)  # datasets derived from this one have none
    return dataset


def _whole(numbers: Any, count: Any) -> Any:
    """Returns a dataset of these `count` numbers at once, or an empty one."""
    return tf.data.Dataset.from_tensors(numbers).take(count)


def steps_of(count: Any, size: int, *, full: bool) -> Any:
    """Returns how many batches of a size so many elements make."""
    return count // size if full else -(-count // size)


def _variant_of(variant: Any, dataset: Any) -> Any:
    """Returns the dataset of a variant, made of a dataset of the same elements."""
    made = tf.data.experimental.from_variant(variant, dataset.element_spec)
    # TensorFlow's own datasets hold their input too: its Python functions stay alive, and graphs see its options.
    made._inputs = lambda: [dataset]
    return made
