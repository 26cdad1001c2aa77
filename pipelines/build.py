"""Assembles the dataset that a layout describes, with checks in the graph for elements that were not sampled."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.cache.stored import stored
from tfopt.pipelines.device import copy_ahead
from tfopt.pipelines.device_data import DeviceStage, NotAttached, refusing, with_stage
from tfopt.pipelines.device_room import OnDevice
from tfopt.pipelines.layout import Layout
from tfopt.pipelines.refusals import refuse_restarting
from tfopt.pipelines.sampling import Shapes
from tfopt.pipelines.service.client import from_service
from tfopt.pipelines.service.parts import distributed
from tfopt.pipelines.shared.elements import apply, element_of, leaves, without_autograph
from tfopt.pipelines.shared.last_batch import pad_batch
from tfopt.pipelines.shared.nondeterminism import find_in_function
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import part_seed, shuffle
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.steps import Step, augmentations, before_and_behind, run

_CHUNK_BYTES = 64 * 2**20  # of examples that are on their way to the device


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


def assemble(source: Source, options: PipelineOptions, layout: Layout, what: str) -> Any:
    """Returns the dataset of batches.

    Args:
        source: The source.
        options: The pipeline's options.
        layout: What was decided.
        what: What a cache on disk holds, for whoever looks at it.
    """
    dataset = _batches(source, options, layout, what)
    if not isinstance(layout.on_device, OnDevice):
        return dataset
    stage = _stage(source, options, layout, layout.on_device, dataset.element_spec, what)
    return with_stage(NotAttached(dataset) if layout.on_device.only else dataset, stage)


def _batches(source: Source, options: PipelineOptions, layout: Layout, what: str) -> Any:
    """The dataset of batches; where they are made on the device, the same one, which fails if it is iterated."""
    dataset = _read(source, options, layout)
    if layout.cache.on == "device":
        dataset, layout = refusing(dataset), replace(_uncached(layout), device=None)
    if layout.shuffle_first:
        dataset = _shuffle(dataset, options, layout)
    if layout.batch_first:
        dataset = _batch(dataset, options, layout)
        dataset = dataset.map(source.decode, num_parallel_calls=tf.data.AUTOTUNE, name="gather")
    else:
        dataset = _batch(_examples(dataset, source, options, layout, what), options, layout)
    if options.service is not None:
        full_batches, steps = layout.static_batch, layout.steps(options)
        dataset = from_service(dataset, options, layout.part, full_batches=full_batches, steps=steps)
    dataset = _by_batch(dataset, options)
    if options.prefetch != 0:
        dataset = dataset.prefetch(tf.data.AUTOTUNE if options.prefetch == "auto" else options.prefetch)
    dataset = dataset.with_options(_settings(layout))
    if layout.part is not None:
        return distributed(dataset, layout.part)
    return dataset if layout.device is None else copy_ahead(dataset, layout.device, layout.steps(options))


def _stage(
    source: Source, options: PipelineOptions, layout: Layout, held: OnDevice, element_spec: Any, what: str
) -> DeviceStage:
    """Returns what makes the batches on the device."""
    plain = source.resident and options.transform is None and options.crop is None
    # Whole epochs are shuffled by number. A cache on disk is read, one in host memory would only be filled.
    unshuffled = replace(layout, shuffle_buffer=0, shuffle_first=False, augment_decodes=False)
    unshuffled = unshuffled if layout.cache.folder is not None else _uncached(unshuffled)
    count = (layout.count if layout.used is None else layout.used) or 0
    # No larger than the count: `batch` makes room for a whole one at once.
    size = min(count, math.ceil(_CHUNK_BYTES / max(layout.sample.example_bytes, 1)))
    dataset = _read(source, options, layout)
    if plain and source.decode is not None:
        spec = _examples(dataset, source, options, unshuffled, what).element_spec
        chunks = dataset.batch(size).map(source.decode)
    else:
        examples = _examples(dataset, source, options, unshuffled, what)
        spec, chunks = examples.element_spec, examples.batch(size)
    return DeviceStage(
        chunks=chunks.prefetch(1).with_options(_settings(layout)),
        spec=spec,
        element_spec=element_spec,
        count=count,
        options=options,
        held=held,
        settings=_settings(layout),
        steps=layout.steps(options) or 0,
    )


def _uncached(layout: Layout) -> Layout:
    return replace(layout, cache=replace(layout.cache, on=None), key=None)


def _read(source: Source, options: PipelineOptions, layout: Layout) -> Any:
    # What is cached on disk has one order; it is mixed well once, and shuffled behind the cache.
    part, seed = ("files", options.seed) if layout.key is None else ("mix", options.seed or 0)
    if options.shuffle and source.shuffled is not None:
        dataset = source.shuffled(part_seed(seed, part))
    else:
        dataset = source.dataset()
    if layout.count is not None and int(dataset.cardinality()) < 0 and options.service is None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(layout.count))
    if layout.mixing_buffer:
        dataset = shuffle(dataset, layout.mixing_buffer, part_seed(seed, part), reshuffle=False)
    return dataset if layout.used is None else dataset.take(layout.used)


def _shuffle(dataset: Any, options: PipelineOptions, layout: Layout) -> Any:
    seed, served = part_seed(options.seed, "shuffle"), options.service is not None
    return shuffle(dataset, layout.shuffle_buffer, seed, anew=served)


def _examples(dataset: Any, source: Source, options: PipelineOptions, layout: Layout, what: str) -> Any:
    """Decodes, crops, transforms, caches, shuffles and augments."""
    before, behind = before_and_behind(source, options, layout)
    augment = augmentations(options, by_batch=False)
    if layout.augment_decodes:
        behind, augment = [], [*behind, *augment]
    shuffles = bool(layout.shuffle_buffer) and not layout.shuffle_first
    if layout.cache.on is not None:
        dataset = _cached(dataset, before, source, layout, what, last=not behind)
        dataset = _shuffle(dataset, options, layout) if shuffles else dataset
    here = layout.cache.on is None or bool(behind)
    check = _checking(source, layout, is_raw=not before) if here else None
    served = options.service is not None
    dataset = run(dataset, behind, part_seed(options.seed, "crop"), check=check, served=served)
    if layout.cache.on is None and shuffles:
        dataset = _shuffle(dataset, options, layout)
    return _augmented(dataset, augment, options)


def _cached(dataset: Any, steps: list[Step], source: Source, layout: Layout, what: str, *, last: bool) -> Any:
    """Caches what comes out of these steps."""
    check = _checking(source, layout, is_raw=True) if last else None
    if layout.cache.folder is None or layout.key is None:
        return run(dataset, steps, None, check=check).cache()
    expected = None if layout.cache.bytes is None else int(layout.cache.bytes)
    store = Store(
        layout.cache.folder,
        layout.key,
        count=layout.count if layout.used is None else layout.used,
        expected_bytes=expected,
        limit_bytes=layout.cache_limit_bytes,
        what=what,
    )
    prepare = partial(run, steps=steps, seed=None, deterministic=True, check=check)
    return stored(store, prepare(dataset).element_spec, dataset, prepare)


def _augmented(dataset: Any, steps: list[Step], options: PipelineOptions, part: str = "augment") -> Any:
    served = options.service is not None and part == "augment"
    dataset = run(dataset, steps, part_seed(options.seed, part), served=served)
    if steps and not all(step.seeded for step in steps):
        # The planner looked; tf.random.set_seed may have been called since.
        refuse_restarting("augment", find_in_function(dataset._map_func.function))
    return dataset


def _batch(dataset: Any, options: PipelineOptions, layout: Layout) -> Any:
    return dataset.batch(
        options.batch_size, drop_remainder=layout.static_batch and options.service is None, name="batch"
    )


def _by_batch(dataset: Any, options: PipelineOptions) -> Any:
    dataset = _augmented(dataset, augmentations(options, by_batch=True), options, "batch")
    if options.remainder == "pad":
        spec = dataset.element_spec

        @without_autograph
        def padded(*arguments: Any) -> Any:
            return pad_batch(element_of(arguments, spec), options.batch_size)

        dataset = dataset.map(padded, num_parallel_calls=tf.data.AUTOTUNE, name="pad")
    return dataset


def _settings(layout: Layout) -> Any:
    settings = tf.data.Options()
    settings.deterministic = layout.deterministic
    settings.autotune.ram_budget = layout.ahead_mib * 2**20
    if layout.threads is not None:
        settings.threading.private_threadpool_size = layout.threads
        settings.autotune.cpu_budget = layout.threads
    return settings


def _checking(source: Source, layout: Layout, *, is_raw: bool) -> Callable[[Any, Any], Any] | None:
    """Returns a function of an element before and behind a map that checks the latter's shapes; None for no need."""
    guard, origin = layout.guard, source.origin if is_raw else None
    if guard is None:
        return None

    @without_autograph
    def checked(before: Any, example: Any) -> Any:
        name = tf.constant(f"An element of {source.name}") if origin is None else apply(origin, before)
        return _expect_shapes(example, guard, name)

    return checked


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
