"""`inspect_source()`: everything the planner learns about a source and the functions before it decides."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.inspection.sampling import Sample, take_sample
from tfopt.pipelines.inspection.tracing import Traced, trace
from tfopt.pipelines.service.client import Part, refuse_unserved, take_part
from tfopt.pipelines.shared.elements import accepts_seed
from tfopt.pipelines.shared.functions import expect_paddable
from tfopt.pipelines.shared.nondeterminism import Finding
from tfopt.pipelines.shared.options import PipelineOptions, unmarked
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
    used: int | None  # examples to read: without a shuffle, not those that fill no batch and would always be dropped
    steps: int | None  # batches per epoch; None if unknown or endless
    infinite: bool  # whether the source never ends
    doubt: str  # why what a cache would hold may come out differently later; "" if it will not
    traced: Traced
    sample: Sample


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
    drops = options.remainder == "drop"
    tail = 0 if count is None else count % options.batch_size
    drops_tail = drops and not options.shuffle and options.service is None
    steps = None if count is None else (count - tail) // options.batch_size + (tail > 0 and not drops)
    return Facts(
        source=source,
        part=part,
        count=count,
        used=count - tail if count is not None and drops_tail else count,
        steps=steps if part is None else part.steps,
        infinite=infinite,
        doubt=doubt,
        traced=traced,
        sample=sample,
    )


def refuse_frozen(options: PipelineOptions, traced: Traced) -> None:
    """Refuses random operations before the cache, where each epoch would repeat the first one's draws.

    Also if cache="auto" would find no room right now: whether a model trains on fresh draws must not depend on free
    memory.

    Raises:
        ValueError: If there are random operations, and `cache` is not None.
    """
    if options.cache is None:
        return
    frozen = "the cache would freeze its result, and every epoch would be the same."
    for found in _only(traced.in_transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {frozen} Move it to `augment`, which runs "
            "after the cache, or pass cache=None."
        )
    for found in _only(traced.in_source, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {frozen} Take it out and pass it as `augment`, or "
            "pass cache=None."
        )
    for found in _only(traced.in_source, "shuffle"):
        if options.training and not options.shuffle:
            raise ValueError(
                f"Expected a source that does not shuffle. It holds {found}: the cache would freeze its order. Pass "
                "shuffle=True instead, or cache=None."
            )


def refuse_unrepeatable(options: PipelineOptions, traced: Traced) -> None:
    """Refuses what a seed could not make the same on every run.

    Raises:
        ValueError: If `seed` is given, and the source, `transform` or `augment` draws random numbers not derived from
            it.
    """
    if options.seed is None:
        return
    broken = f"seed={options.seed} could not make it the same on every run."
    for found in _only(traced.in_source, "random", "assigning", "shuffle"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {broken} Take it out (`shuffle` and `augment` do it "
            "under the pipeline's seed), or pass seed=None."
        )
    for found in _only(traced.in_transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {broken} Move it to an `augment` with a keyword "
            "`seed`, or pass seed=None."
        )
    draws = ("random", "assigning")
    for function, findings in zip(options.augmentations, traced.in_augment, strict=True):
        for found in _only(findings, *(draws if accepts_seed(unmarked(function)) else (*draws, "opaque"))):
            raise ValueError(
                f"Expected an `augment` that draws from its keyword `seed` alone. It holds {found}: {broken} Give it "
                "a keyword `seed` (int32, shape (2,)) and use stateless operations with it, such as "
                "tf.image.stateless_random_flip_left_right(image, seed), or pass seed=None."
            )


def refuse_restarting(stage: str, findings: Iterable[Finding]) -> None:
    """Refuses random operations with a fixed seed, whose draws TensorFlow repeats in every epoch.

    Args:
        stage: "augment" or "transform".
        findings: What was found in it.

    Raises:
        ValueError: If there are such operations.
    """
    for found in findings:
        if found.restarts:
            raise ValueError(
                f"Expected {stage!r} to draw new numbers in each epoch. It holds {found} with a fixed seed, from an "
                "argument or from tf.random.set_seed (which keras.utils.set_random_seed calls): in a dataset it "
                "repeats its draws in every epoch. Use an `augment` with a keyword `seed` (int32, shape (2,)) and "
                "stateless operations, such as tf.image.stateless_random_flip_left_right(image, seed)."
            )


def _only(findings: Iterable[Finding], *kinds: str) -> list[Finding]:
    return [finding for finding in findings if finding.kind in kinds]


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
