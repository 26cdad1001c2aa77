"""Assembles the dataset that a layout describes, with checks in the graph for elements that were not sampled."""

from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.elements import apply, apply_stage, element_of, leaves, without_autograph
from tfopt.pipelines.layout import Layout
from tfopt.pipelines.options import PipelineOptions
from tfopt.pipelines.randomness import find_in_function
from tfopt.pipelines.refusals import refuse_restarting
from tfopt.pipelines.sampling import Shapes
from tfopt.pipelines.seeds import element_seed, part_seed, shuffle, with_words
from tfopt.pipelines.sources.source import Source


def count_elements(source: Source, whole: Any) -> tuple[int | None, bool]:
    """Returns the number of elements, None where unknown, and whether there is no end of them.

    Args:
        source: The source.
        whole: All its raw elements.

    Raises:
        PipelineError: The source's count is not the dataset's.
    """
    cardinality = int(whole.cardinality())
    infinite = cardinality == tf.data.INFINITE_CARDINALITY
    if source.count is not None and (infinite or (cardinality >= 0 and cardinality != source.count)):
        found = "no end" if infinite else str(cardinality)
        raise PipelineError(
            f"Expected {source.count} elements: {source.name} says that it has {source.count} elements. Its dataset "
            f"has {found}. Correct the source's `count`, or leave it out."
        )
    return (cardinality if cardinality >= 0 else source.count), infinite


def assemble(source: Source, options: PipelineOptions, layout: Layout) -> Any:
    """Returns the dataset of batches."""
    dataset = _read(source, options, layout)
    if layout.shuffle_buffer and layout.shuffle_first:
        dataset = _shuffle(dataset, options, layout)
    if layout.batch_first:
        dataset = _batch(dataset, options, layout).map(source.decode, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        dataset = _batch(_examples(dataset, source, options, layout), options, layout)
    if options.prefetch != 0:
        dataset = dataset.prefetch(tf.data.AUTOTUNE if options.prefetch == "auto" else options.prefetch)
    settings = tf.data.Options()
    settings.deterministic = layout.deterministic
    return dataset.with_options(settings)


def _read(source: Source, options: PipelineOptions, layout: Layout) -> Any:
    if options.shuffle and source.shuffled is not None:
        dataset = source.shuffled(part_seed(options.seed, "files"))
    else:
        dataset = source.dataset()
    if layout.count is not None and int(dataset.cardinality()) < 0:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(layout.count))
    return dataset if layout.used is None else dataset.take(layout.used)


def _shuffle(dataset: Any, options: PipelineOptions, layout: Layout) -> Any:
    return shuffle(dataset, layout.shuffle_buffer, part_seed(options.seed, "shuffle"))


def _examples(dataset: Any, source: Source, options: PipelineOptions, layout: Layout) -> Any:
    """Decodes, transforms, caches, shuffles and augments."""
    if not layout.augment_decodes:
        dataset = _decode_and_transform(dataset, source, options, layout)
    if layout.cached:
        dataset = dataset.cache()
    if layout.shuffle_buffer and not layout.shuffle_first:
        dataset = _shuffle(dataset, options, layout)
    return _augment(dataset, source, options, layout)


def _decode_and_transform(dataset: Any, source: Source, options: PipelineOptions, layout: Layout) -> Any:
    spec = dataset.element_spec
    if source.decode is None and options.transform is None and layout.guard is None:
        return dataset

    # Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
    def example(*arguments: Any) -> Any:
        raw = element_of(arguments, spec)
        result = apply_stage("transform", options.transform, apply_stage("decode", source.decode, raw))
        return result if layout.guard is None else _expect_shapes(result, layout.guard, _name(source, raw))

    return dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE, name="decode_and_transform")


def _augment(dataset: Any, source: Source, options: PipelineOptions, layout: Layout) -> Any:
    augment, decode = options.augment, source.decode if layout.augment_decodes else None
    if augment is None:
        return dataset
    spec = dataset.element_spec

    def drawn(*arguments: Any) -> Any:
        return apply_stage("augment", augment, apply_stage("decode", decode, element_of(arguments, spec)))

    def seeded(element: Any, word: Any, place: Any) -> Any:
        return apply_stage("augment", augment, apply_stage("decode", decode, element), seed=element_seed(word, place))

    if layout.takes_seed:
        dataset = with_words(dataset, part_seed(options.seed, "augment"))
        return dataset.map(seeded, num_parallel_calls=tf.data.AUTOTUNE, name="augment")
    dataset = dataset.map(drawn, num_parallel_calls=tf.data.AUTOTUNE, name="augment")
    # The planner looked; tf.random.set_seed may have been called since.
    refuse_restarting("augment", find_in_function(dataset._map_func.function))
    return dataset


def _batch(dataset: Any, options: PipelineOptions, layout: Layout) -> Any:
    return dataset.batch(options.batch_size, drop_remainder=layout.static_batch)


@without_autograph
def _expect_shapes(example: Any, shapes: Shapes, name: Any) -> Any:
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


@without_autograph
def _name(source: Source, raw: Any) -> Any:
    """Returns what to call a raw element, in a graph."""
    return tf.constant(f"An element of {source.name}") if source.origin is None else apply(source.origin, raw)


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
