"""`inspect_source()`: everything the planner learns about a source and the functions before it decides."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.inspection.sample import (
    MEASURED,
    SAMPLED,
    Sample,
    ShapeCheck,
    expect_same_again,
    open_source,
    take_sample,
)
from tfopt.pipelines.inspection.tracing import Traced, trace
from tfopt.pipelines.service.client import refuse_unserved
from tfopt.pipelines.shared.elements import expect_lengths, expect_paddable, is_static
from tfopt.pipelines.shared.nondeterminism import Finding, find_in_dataset, refuse_draws
from tfopt.pipelines.shared.options import PipelineOptions, Remainder, choose_remainder
from tfopt.pipelines.sources.parts import Part, expect_alone, expect_one_order, take_part
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.sources.split import take_split

Take = Callable[[Source, PipelineOptions], tuple[Source, Part | None]]

MIB = 2**20
# For the shuffle's buffer. Fixed, not a share of the free memory: under a seed the order must not depend on what else
# runs.
SHUFFLE_MIB = 1024
SHUFFLE_MOST = 100_000  # elements in that buffer, if these are read or computed for it
_LARGE_BYTES = 32 * 2**10  # of an example; a batch of smaller ones is copied quickly from any memory
_DOUBTS = {
    "opaque": "calls Python, which may be random; cache='memory' says that it is not",
    "reading": "reads a variable, which may change; cache='memory' says that it does not",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the decisions rest on."""

    source: Source  # where several processes train together, the part this one reads
    part: Part | None = None  # which part that is; None if this process reads everything
    count: int | None  # examples of `source`; None if unknown
    used: int | None  # examples to read: without a shuffle, not those that fill no batch and would always be dropped
    steps: int | None  # batches per epoch; None if unknown or endless
    last_batch: tuple[Remainder, str]  # what becomes of a smaller one, and why
    mixed: bool = (
        False  # whether each epoch is shuffled as a whole, so that a dropped remainder consists of others each time
    )
    infinite: bool  # whether the source never ends
    in_source: list[Finding]  # in the source's dataset and its `decode`
    doubt: str = ""  # why what a cache would hold may come out differently later; "" if it will not
    traced: Traced
    sample: Sample
    check: ShapeCheck | None = None  # of examples; None if TensorFlow knows their shapes
    raw_examples: bool = True  # whether raw elements are examples: nothing decodes, crops or transforms them
    by_batch: bool = False  # whether `decode_batch` is quicker for these examples than `decode`
    pinned: bool = False  # whether batches are worth the map-and-batch that makes them in memory pinned for the GPU

    def traced_again(self, options: PipelineOptions) -> "Facts":
        """Returns the facts with the functions up to `transform` traced now: what they read may have changed."""
        return replace(self, traced=trace(self.source, options, self.traced.raw, again=True))


def inspect_source(source: Source, options: PipelineOptions, take: Take = take_part) -> Facts:
    """Traces the functions, reads a sample through them, and refuses what could not be trained on.

    Several processes `take` a part each.

    Raises:
        PipelineError: If data is missing, empty, damaged or of different shapes, a function failed, or there are too
            few examples.
        TypeError: If a function is a Keras layer of one input, and examples are tuples.
        ValueError: If random draws would be frozen, repeated or out of the seed's control, or examples cannot be
            cropped or padded, or a tf.data service could not run the pipeline.
        UnsupportedError: If several processes train together and cannot divide the source.
    """
    if options.split is not None:
        source = take_split(source, options.split, training=options.training)
    source, part = take(source, options)
    whole, raw, count, infinite = open_source(source, MEASURED if options.bucket else SAMPLED)
    traced = trace(source, options, raw)
    in_source = find_in_dataset(whole) + traced.in_decode
    divided = "each time, for `split`" if options.split is not None else ""
    if part is not None and options.service is None:
        divided = "in each of several processes, which divide it"
    if divided:
        expect_one_order(source, in_source, divided)
    refuse_draws(options, in_source, traced.in_transform, traced.in_augment)
    _expect_batches(options, traced)
    sample = take_sample(source, options, traced)
    if divided and any(found.kind == "opaque" for found in in_source):  # only reading tells what Python returns
        expect_same_again(source, traced, sample, divided)
    if options.service is not None:
        sent = count if part is None else part.whole  # a process sends all its arrays, whatever it reads of them
        refuse_unserved(
            source,
            options,
            in_source=in_source,
            in_transform=traced.in_transform,
            in_augment=traced.in_augment,
            decoded_bytes=sample.decoded_bytes * (sent or 0),
            infinite=infinite,
        )
    mixed = _is_mixed(options, source, sample, count)
    return _concluded(source, options, part, count, traced, sample, in_source, infinite=infinite, mixed=mixed)


def inspect_loader(source: Source, options: PipelineOptions) -> Facts:
    """Learns the same about a source of whole batches; its counts are of batches.

    Raises what `inspect_source` does.
    """
    expect_alone(source)
    whole, raw, count, infinite = open_source(source)
    traced = trace(source, options, raw)
    in_source = find_in_dataset(whole)
    refuse_draws(options, in_source, [], traced.in_augment)
    return Facts(
        source=source,
        count=count,
        used=count,
        steps=count,
        last_batch=("keep", "the loader makes the batches"),
        infinite=infinite,
        in_source=in_source,
        traced=traced,
        sample=take_sample(source, options, traced),
    )


def inspect_mixture(
    source: Source,
    options: PipelineOptions,
    sampled: Any,
    *,
    part: Part | None,
    count: int | None,
    infinite: bool,
    mixed: bool,
) -> Facts:
    """Learns the same about mixed examples, of which some are given, and the functions that follow.

    Args:
        source: The mixture, whose elements are examples.
        options: Without those that hold for its parts alone.
        sampled: A dataset of a few examples of each part.
        part: What this process has of the mixture; None if it trains alone.
        count: Examples that this process mixes in an epoch; None if unknown.
        infinite: Whether the mixture never ends.
        mixed: Whether each epoch is shuffled as a whole.

    Raises what `inspect_source` does.
    """
    traced = trace(source, options, sampled)
    refuse_draws(options, [], [], traced.in_augment)
    _expect_batches(options, traced)
    sample = take_sample(source, options, traced)
    return _concluded(source, options, part, count, traced, sample, [], infinite=infinite, mixed=mixed)


def _expect_batches(options: PipelineOptions, traced: Traced) -> None:
    """Refuses examples that cannot be padded, or batches that cannot be filled, as the options ask."""
    if options.pad is not None:
        expect_lengths(traced.examples.element_spec, bucket=options.bucket)
    if options.remainder == "pad":
        expect_paddable(traced.augmented.element_spec)


def _concluded(
    source: Source,
    options: PipelineOptions,
    part: Part | None,
    count: int | None,
    traced: Traced,
    sample: Sample,
    in_source: list[Finding],
    *,
    infinite: bool,
    mixed: bool,
) -> Facts:
    """Returns the facts, with what follows for the last batch and the steps; refuses too few examples."""
    tail = _tail(options, part, count)
    left_out = None if count is None and not infinite else tail
    last_batch = choose_remainder(options, count, left_out, mixed=mixed) if part is None else part.last_batch
    drops = last_batch[0] == "drop"
    if part is None and count is not None and drops and count < options.batch_size:
        raise PipelineError(
            f"Expected at least batch_size={options.batch_size} examples with remainder='drop'. {source.name} has "
            f"{count}: there would be zero steps. Pass a smaller batch_size, or remainder='keep'."
        )
    findings = in_source + traced.in_transform
    drops_tail = drops and not options.shuffle and options.service is None
    steps = None if count is None else (count - tail) // options.batch_size + (tail > 0 and not drops)
    # `augment` may bring images of any size to one, as a random crop does.
    augments = bool(options.augmentations)
    static = is_static(traced.examples.element_spec) or (augments and is_static(traced.augmented.element_spec))
    one_shape = static or options.pad is not None
    check = None if one_shape else ShapeCheck(sample.common_shapes(), source.name, source.origin)
    bare = options.crop is None and options.transform is None
    dense = all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(traced.augmented.element_spec))
    pinned = sample.example_bytes >= _LARGE_BYTES and dense and options.pad is None and _copies(options)
    return Facts(
        source=source,
        part=part,
        count=count,
        used=count - tail if count is not None and drops_tail else count,
        steps=steps if part is None else part.steps,
        last_batch=last_batch,
        mixed=mixed,
        infinite=infinite,
        in_source=in_source,
        doubt=next((f"{found} {_DOUBTS[found.kind]}" for found in findings if found.kind in _DOUBTS), ""),
        traced=traced,
        sample=sample,
        check=check,
        raw_examples=bare and source.decode is None,
        by_batch=source.decode_batch is not None and not pinned,
        pinned=pinned,
    )


def _tail(options: PipelineOptions, part: Part | None, count: int | None) -> int:
    """How many examples fill no batch; of a part, those that it leaves out."""
    if part is not None and count is not None and options.service is None:
        return count - part.used if part.last_batch[0] == "drop" else 0
    return 0 if count is None else count % options.batch_size


def _is_mixed(options: PipelineOptions, source: Source, sample: Sample, count: int | None) -> bool:
    """Whether an epoch is surely a permutation of all examples, so that it leaves out others than the one before.

    With cache="auto" as without a cache: its choice differs with free memory, and the number of steps must not.
    """
    if not options.shuffle or count is None:
        return False
    by_position = source.at is not None and options.service is None
    if by_position or options.cache in ("memory", "device"):
        return True
    # The largest that the shuffle's buffer may hold, wherever it stands.
    each = max(sample.decoded_bytes, sample.example_bytes) if options.cache_folder else sample.raw_bytes
    return count * each <= SHUFFLE_MIB * MIB and (source.is_at_hand or count <= SHUFFLE_MOST)


def _copies(options: PipelineOptions) -> bool:
    """Whether batches are copied to a device, by the pipeline or by what trains on them."""
    return options.device not in ("auto", None) or bool(tf.config.list_logical_devices("GPU"))
