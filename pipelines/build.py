"""Assembles the dataset that a layout describes."""

from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.elements import apply, element_of
from tfopt.pipelines.guards import expect_shapes, namer
from tfopt.pipelines.layout import Layout
from tfopt.pipelines.options import PipelineOptions
from tfopt.pipelines.randomness import find_in_function
from tfopt.pipelines.refusals import refuse_restarting
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
        raise PipelineError(f"{source.name} says that it has {source.count} elements. Its dataset has {found}.")
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
    decode, transform, name, spec = source.decode, options.transform, namer(source), dataset.element_spec
    if decode is None and transform is None and layout.guard is None:
        return dataset

    # Not marked do_not_convert: AutoGraph must reach the user's functions, as in Dataset.map.
    def example(*arguments: Any) -> Any:
        raw = element_of(arguments, spec)
        result = raw
        if decode is not None:
            with tf.name_scope("decode"):
                result = apply(decode, raw)
        if transform is not None:
            with tf.name_scope("transform"):
                result = apply(transform, result)
        return result if layout.guard is None else expect_shapes(result, layout.guard, name(raw))

    return dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE, name="decode_and_transform")


def _augment(dataset: Any, source: Source, options: PipelineOptions, layout: Layout) -> Any:
    augment, decode = options.augment, source.decode if layout.augment_decodes else None
    if augment is None:
        return dataset
    spec = dataset.element_spec

    def augmented(element: Any) -> Any:
        return element if decode is None else apply(decode, element)

    def drawn(*arguments: Any) -> Any:
        with tf.name_scope("augment"):
            return apply(augment, augmented(element_of(arguments, spec)))

    def seeded(element: Any, word: Any, place: Any) -> Any:
        with tf.name_scope("augment"):
            return apply(augment, augmented(element), seed=element_seed(word, place))

    if layout.takes_seed:
        dataset = with_words(dataset, part_seed(options.seed, "augment"))
        return dataset.map(seeded, num_parallel_calls=tf.data.AUTOTUNE, name="augment")
    dataset = dataset.map(drawn, num_parallel_calls=tf.data.AUTOTUNE, name="augment")
    # The planner looked; tf.random.set_seed may have been called since.
    refuse_restarting("augment", find_in_function(dataset._map_func.function))
    return dataset


def _batch(dataset: Any, options: PipelineOptions, layout: Layout) -> Any:
    return dataset.batch(options.batch_size, drop_remainder=layout.static_batch)
