"""`inspect_source()`: everything the planner learns about a source and the functions before it decides."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.inspection.determinism import refuse_frozen, refuse_restarting, refuse_unrepeatable
from tfopt.pipelines.inspection.sampling import Sample, take_sample
from tfopt.pipelines.inspection.tracing import Traced, trace
from tfopt.pipelines.service.client import refuse_unserved
from tfopt.pipelines.service.parts import Part, take_part
from tfopt.pipelines.shared.last_batch import expect_paddable
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.sources.source import Source

_DOUBTS = {
    "opaque": "calls Python, which may be random; cache='memory' says that it is not",
    "reading": "reads a variable, which may change; cache='memory' says that it does not",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the decisions rest on."""

    source: Source  # with several processes on a tf.data service, the part this one reads
    part: Part | None  # which part that is; None if this process reads everything
    count: int | None  # examples of `source`; None if unknown
    infinite: bool  # whether the source never ends
    doubt: str  # why what a cache would hold may come out differently later; "" if it will not
    traced: Traced
    sample: Sample

    def used(self, options: PipelineOptions) -> int | None:
        """Examples to read: without a shuffle, not those that fill no batch and would be dropped in every epoch."""
        drops_tail = options.remainder == "drop" and not options.shuffle and options.service is None
        return self.count - self.count % options.batch_size if drops_tail and self.count is not None else self.count

    def steps(self, options: PipelineOptions) -> int | None:
        """Batches per epoch; None if unknown or endless."""
        if self.part is not None:
            return self.part.steps
        if self.count is None:
            return None
        rounded_up = options.remainder != "drop" and self.count % options.batch_size > 0
        return self.count // options.batch_size + rounded_up


def inspect_source(source: Source, options: PipelineOptions) -> Facts:
    """Traces the functions, reads a sample through them, and refuses what could not be trained on.

    Raises:
        PipelineError: If data is missing, empty or damaged, a function failed, or there are too few examples.
        TypeError: If a function is a Keras layer of one input, and examples are tuples.
        ValueError: If random draws would be frozen, repeated or out of the seed's control, or examples cannot be
            cropped or padded, or a tf.data service could not run the pipeline.
        UnsupportedError: If the processes on a tf.data service cannot share the source.
    """
    part = None
    if options.service is not None:
        source, part = take_part(source, options)
    whole = source.dataset()
    count, infinite = _count(source, whole)
    traced = trace(source, whole, options)
    refuse_frozen(options, traced)
    refuse_unrepeatable(options, traced)
    refuse_restarting("transform", traced.in_transform)
    for findings in traced.in_augment:
        refuse_restarting("augment", findings)
    if options.remainder == "pad":
        expect_paddable(traced.augmented.element_spec)
    sample = take_sample(source, options, traced)
    if options.service is not None:
        sent = count if part is None else part.whole  # a process sends all its arrays, whatever it reads of them
        refuse_unserved(
            source,
            options,
            in_source=traced.in_source,
            in_transform=traced.in_transform,
            in_augment=traced.in_augment,
            decoded_bytes=sample.decoded_bytes * (sent or 0),
            infinite=infinite,
        )
    if part is None and count is not None and options.remainder == "drop" and count < options.batch_size:
        raise PipelineError(
            f"Expected at least batch_size={options.batch_size} examples with remainder='drop'. {source.name} has "
            f"{count}: there would be zero steps. Pass a smaller batch_size, or remainder='keep'."
        )
    findings = traced.in_source + traced.in_transform
    doubt = next((f"{found} {_DOUBTS[found.kind]}" for found in findings if found.kind in _DOUBTS), "")
    return Facts(source=source, part=part, count=count, infinite=infinite, doubt=doubt, traced=traced, sample=sample)


def _count(source: Source, whole: Any) -> tuple[int | None, bool]:
    """Returns the number of elements, None if unknown, and whether they never end."""
    cardinality = int(whole.cardinality())
    infinite = cardinality == tf.data.INFINITE_CARDINALITY
    if source.count is not None and (infinite or (cardinality >= 0 and cardinality != source.count)):
        found = "no end" if infinite else str(cardinality)
        raise PipelineError(
            f"Expected {source.count} elements, which {source.name} gives as its `count`. Its dataset has {found}. "
            "Correct the source's `count`, or leave it out."
        )
    return (cardinality if cardinality >= 0 else source.count), infinite
