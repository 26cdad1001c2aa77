"""Derives the seeds of a pipeline's parts, and gives each element of each epoch its own."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.shared.elements import apply_stage, element_of, in_single_examples, without_autograph
from tfopt.pipelines.shared.options import StageFunction

_PARTS = ("files", "shuffle", "augment", "crop", "batch", "mix")
# Dataset.shuffle and Dataset.random mix tf.random.set_seed into their seed, so a second model in the process would see
# another order. Their operations take both halves of a seed; this one stands for the global half.
_FIRST_HALF = 87654321
_IN_BATCHES = "_tfopt_in_batches"


def part_seed(seed: int | None, part: str) -> int | None:
    """Returns the seed of one of `_PARTS`, independent of the others'; None stays None."""
    if seed is None:
        return None
    # SeedSequence is stable across NumPy versions; 31 bits, since TensorFlow stores some seeds as int32.
    return int(np.random.SeedSequence((seed, _PARTS.index(part))).generate_state(1)[0] >> 1)


def mixed_seed(seed: int | None, number: int) -> int | None:
    """Returns the seed of a part of a mixture, by its number; None stays None."""
    if seed is None:
        return None
    return int(np.random.SeedSequence((seed, len(_PARTS), number)).generate_state(1)[0] >> 1)


def shuffle(
    dataset: Any, buffer: int, seed: int | None, *, reshuffle: bool = True, redraw: bool = False, opened: int = 0
) -> Any:
    """Shuffles a dataset; with a seed, the order depends on nothing else, not even on `tf.random.set_seed`.

    Args:
        dataset: What to shuffle.
        buffer: How many elements the shuffle draws from.
        seed: Default: a random one.
        reshuffle: Whether each iteration has another order.
        redraw: Without a seed, draws a new one in each process and epoch, regardless of `tf.random.set_seed`. A dataset
            that runs on another machine is rebuilt for each epoch, and would otherwise repeat its order.
        opened: How many iterations' orders to leave out, with a seed.
    """
    if seed is None and not redraw:
        return dataset.shuffle(buffer, reshuffle_each_iteration=reshuffle)
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=tf.constant(buffer, tf.int64),
        reshuffle_each_iteration=reshuffle,
        **(_seeds(0, 0) if seed is None else _seeds(_FIRST_HALF, seed)),
        **dataset._flat_structure,
    )
    shuffled = tf.data.experimental.from_variant(variant, dataset.element_spec)
    # TensorFlow's own datasets hold their input too: its Python functions stay alive, and graphs see its options.
    shuffled._inputs = lambda: [dataset]
    return _after(opened, shuffled.with_options(dataset.options()))


def permutation(count: int, seed: int | None, *, reshuffle: bool = True, opened: int = 0, skipped: int = 0) -> Any:
    """Returns a dataset of the numbers below `count` in a random order, drawn at once when it is first read.

    That takes 67 ms for 1.28 million numbers, and 6.4 s with Dataset.shuffle. It holds 8 bytes a number; takes a seed,
    `reshuffle` and `opened` as `shuffle` does, and leaves out the first `skipped` numbers of each order. `in_batches`
    gives many at once.
    """
    if seed is None and not reshuffle:
        seed = int(next(iter(_random_bits(None))))
    bits = _random_bits(seed, opened) if reshuffle else tf.data.Dataset.from_tensors(tf.constant(seed, tf.int64))
    skipped = min(skipped, count)
    left = count - skipped

    def drawn(size: int | None, *, full: bool = False) -> Any:
        tail = left % (size or 1)

        @without_autograph
        def epoch(number: Any, bits: Any) -> Any:
            numbers = tf.random.experimental.stateless_shuffle(tf.range(count, dtype=tf.int64), element_seed(bits))
            numbers = numbers[skipped:]
            if size is None:
                return tf.data.Dataset.from_tensor_slices(numbers)
            batches = tf.data.Dataset.from_tensor_slices(tf.reshape(numbers[: left - tail], (-1, size)))
            return batches if full else batches.concatenate(_whole(numbers[left - tail :], tail))

        order = tf.data.Dataset.zip(tf.data.Dataset.range(1), bits).flat_map(epoch)
        return order.apply(tf.data.experimental.assert_cardinality(_steps(left, size or 1, full=full)))

    return _numbers(drawn)


def permutations(count: int, seed: int | None, *, times: int, opened: int = 0, whole: int = 0) -> Any:
    """Returns so many permutations of the numbers below `count` in a row, without the first `whole` ones.

    Takes a seed and `opened` as `permutation` does.
    """

    @without_autograph
    def one(number: Any, bits: Any) -> Any:
        numbers = tf.random.experimental.stateless_shuffle(tf.range(count, dtype=tf.int64), element_seed(bits))
        return tf.data.Dataset.from_tensor_slices(numbers)

    drawn = tf.data.Dataset.zip(tf.data.Dataset.range(times), _random_bits(seed, opened))
    order = drawn.skip(whole).flat_map(one)
    return order.apply(tf.data.experimental.assert_cardinality((times - whole) * count))


def shuffles(
    dataset: Any, buffer: int, seed: int | None, *, times: int, rests: bool, opened: int = 0, whole: int = 0
) -> Any:
    """Returns so many different shuffles of a dataset in a row, without the first `whole` ones.

    All draws are made when an iteration begins, so that how far it is read changes nothing in later ones.

    Args:
        dataset: What to shuffle.
        buffer: How many elements a shuffle draws from.
        seed: Default: a random one.
        times: How many shuffles an iteration has.
        rests: Whether the very first one is the dataset as it is.
        opened: How many iterations' orders to leave out, with a seed.
        whole: How many shuffles to leave out of each iteration.
    """
    at_first = _first_bits()

    @without_autograph
    def one(number: Any, turn: Any, bits: Any) -> Any:
        given = tf.data.experimental.to_variant(dataset)

        def shuffled() -> Any:
            return tf.raw_ops.ShuffleDataset(
                input_dataset=given,
                buffer_size=tf.constant(buffer, tf.int64),
                seed=tf.constant(_FIRST_HALF, tf.int64),
                seed2=bits,
                reshuffle_each_iteration=False,
                **dataset._flat_structure,
            )

        variant = tf.cond(tf.equal(turn, at_first), lambda: given, shuffled) if rests else shuffled()
        return tf.data.experimental.from_variant(variant, dataset.element_spec)

    drawn = tf.data.Dataset.zip(tf.data.Dataset.range(times), _random_bits(0, opened), _random_bits(seed, opened))
    order = drawn.skip(whole).flat_map(one)
    order._inputs = lambda: [drawn, dataset]  # as in `shuffle`
    count = int(dataset.cardinality())
    return order.apply(tf.data.experimental.assert_cardinality((times - whole) * count)) if count >= 0 else order


def epochs(seed: int | None, *, times: int = 1, opened: int = 0, whole: int = 0) -> Any:
    """Returns a dataset of a random number (int64 scalar) for each of so many readings, without the first `whole` ones.

    They differ on each iteration. Takes a seed and `opened` as `permutation` does.
    """
    return _random_bits(seed, opened).take(times).skip(whole)


def from_batches(batches: Any, count: int) -> Any:
    """Returns the dataset of the `count` elements in batches of any length.

    `in_batches` makes others of these, with no step per element.
    """

    def cut(size: int | None, *, full: bool = False) -> Any:
        made = in_single_examples(batches) if size is None else batches.rebatch(size, drop_remainder=full)
        return made.apply(tf.data.experimental.assert_cardinality(_steps(count, size or 1, full=full)))

    return _numbers(cut)


def sequence(count: int, *, skipped: int = 0) -> Any:
    """Returns a dataset of the numbers below `count` in their order, without the first `skipped` ones.

    `in_batches` gives many at once.
    """
    skipped = min(skipped, count)

    def counted(size: int | None, *, full: bool = False) -> Any:
        if size is None:
            return tf.data.Dataset.range(skipped, count)
        tail = (count - skipped) % size

        @without_autograph
        def batch(first: Any) -> Any:
            return first + tf.range(size, dtype=tf.int64)

        batches = tf.data.Dataset.range(skipped, count - tail, size).map(batch)
        return batches if full else batches.concatenate(_whole(tf.range(count - tail, count, dtype=tf.int64), tail))

    return _numbers(counted)


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


def in_turn(first: Any, later: Any, *, opened: int = 0) -> Any:
    """Returns a dataset that is `first` on its first iteration, and `later` on all others.

    Only the one that is read begins. After `opened` iterations, all are `later`.
    """

    @without_autograph
    def chosen(turn: Any) -> Any:
        to_variant = tf.data.experimental.to_variant
        variant = tf.cond(tf.equal(turn, 0), lambda: to_variant(first), lambda: to_variant(later))
        return tf.data.experimental.from_variant(variant, first.element_spec)

    dataset = _turns(opened).flat_map(chosen)
    dataset._inputs = lambda: [first, later]  # for those who look for their functions
    count = int(first.cardinality())
    return dataset.apply(tf.data.experimental.assert_cardinality(count)) if count >= 0 else dataset


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


def moved(first: Any, later: Any) -> Any:
    """Returns a dataset that is `first`, the rest of an iteration, on its first iteration, and `later` on all others.

    Unlike with `in_turn`, every iteration begins `later`, which so draws as often as if it were alone. The cardinality
    is that of `later`: Keras takes it for the steps of each epoch. `in_batches` gives many at once of two such numbers.
    """
    of_first, of_later = (getattr(dataset, _IN_BATCHES, None) for dataset in (first, later))
    if of_first is None or of_later is None:
        return _moved(first, later)
    return _numbers(lambda size, *, full=False: _moved(of_first(size, full=full), of_later(size, full=full)))


def with_random_bits(dataset: Any, seed: int | None, *, opened: int = 0, skipped: int = 0, once: bool = False) -> Any:
    """Pairs each element with the random bits `element_seed` makes its seed from: `(element, bits)`.

    The bits differ from epoch to epoch. They depend on an element's place in the epoch, not on its content, so that
    parallelism changes nothing. They are those of the iterations after `opened` ones, from the place `skipped` on, with
    `once` in the first of them only.
    """
    bits = _random_bits(seed, opened)
    if skipped:
        bits = moved(bits.skip(skipped), _random_bits(seed, opened)) if once else bits.skip(skipped)
    return tf.data.Dataset.zip(dataset, bits)


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


def _numbers(made: Callable[..., Any]) -> Any:
    dataset = made(None)
    setattr(dataset, _IN_BATCHES, made)  # datasets derived from this one have none
    return dataset


def _whole(numbers: Any, count: int) -> Any:
    """Returns a dataset of these `count` numbers at once, or an empty one."""
    return tf.data.Dataset.from_tensors(numbers).take(count)


def _steps(count: int, size: int, *, full: bool) -> int:
    return count // size if full else -(-count // size)


def _turns(opened: int = 0) -> Any:
    """Returns a dataset of one number: 0 on its first iteration, 1 on all others and after `opened` iterations."""
    at_first = _first_bits()

    @without_autograph
    def turn(number: Any, bits: Any) -> Any:
        return tf.cast(tf.not_equal(bits, at_first), tf.int64)

    return tf.data.Dataset.zip(tf.data.Dataset.range(1), _random_bits(0, opened)).map(turn)


def _first_bits() -> int:
    """Returns with what the first iteration of `_random_bits(0)` begins."""
    return int(next(iter(_random_bits(0))))  # of an equal dataset: iterating it would use up its first iteration


def _moved(first: Any, later: Any) -> Any:
    count = int(later.cardinality())
    if count < 0:
        return _first_then([_begun_when_read(first), later])
    # TensorFlow takes a choice for endless if one of its datasets is. This one is never read; assert_cardinality(count)
    # would raise an error at the end of the shorter iteration.
    endless = first.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return _first_then([_begun_when_read(first), later, _begun_when_read(endless)]).take(count)


def _first_then(datasets: Sequence[Any]) -> Any:
    """Returns a dataset that begins all of these on each iteration, and is the first one once, then the second."""
    turns = _turns().flat_map(without_autograph(lambda turn: tf.data.Dataset.from_tensors(turn).repeat()))
    return in_turns(turns, datasets)


def _begun_when_read(dataset: Any) -> Any:
    """Returns the same elements, of which an iteration that is not read costs nothing: a shuffle begins them late."""
    return shuffle(dataset, 1, 0, reshuffle=False)


def _random_bits(seed: int | None, opened: int = 0) -> Any:
    """Returns an endless dataset of random numbers in [0, 2**32) that differ on each iteration.

    With a seed, they are those of the iterations after `opened` ones.
    """
    if seed is None:
        return tf.data.Dataset.random(rerandomize_each_iteration=True)
    spec = tf.TensorSpec((), tf.int64)
    variant = tf.raw_ops.RandomDatasetV2(
        rerandomize_each_iteration=True,
        output_types=[spec.dtype],
        output_shapes=[spec.shape],
        **_seeds(_FIRST_HALF, seed),
    )
    return _after(opened, tf.data.experimental.from_variant(variant, spec))


def _after(opened: int, dataset: Any) -> Any:
    """Returns a dataset of which that many iterations have been begun, which reads nothing: the next draws its seed."""
    for _ in range(opened):
        iter(dataset)
    return dataset


def _seeds(*halves: int) -> dict[str, Any]:
    first, second = (tf.constant(half, tf.int64) for half in halves)
    return {"seed": first, "seed2": second, "seed_generator": tf.raw_ops.DummySeedGenerator()}
