"""Refuses what the workers of a tf.data service cannot do, or would do wrong in silence."""

from typing import Any, NoReturn

from tfopt.pipelines.sampling import Sample, Traced
from tfopt.pipelines.shared.nondeterminism import Finding, lineage
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions
from tfopt.pipelines.sources.source import Source

_GRAPH_BYTES = 2**31 - 2**24  # a graph is a protobuf message of at most 2 GiB; the rest of it takes a little
# The service gives parts of the data to its workers, and each applies these to its own: three workers skip three times
# as many, and zip the parts of two datasets as they come, not as they belong together.
_BY_PLACE = {
    "Take": "take",
    "Skip": "skip",
    "Shard": "shard",
    "Zip": "zip or enumerate",
    "Repeat": "repeat",
    "Batch": "batch",
    "ParallelBatch": "batch",
    "PaddedBatch": "padded_batch",
    "Window": "window",
    "Scan": "scan",
    "TakeWhile": "take_while",
    "Rebatch": "rebatch",
    "GroupByWindow": "group_by_window",
    "GroupByReducer": "group_by_reducer",
    "Unique": "unique",
    "AssertCardinality": "assert_cardinality",
    # Under dynamic sharding TensorFlow 2.21 never ends it.
    "FlatMap": "flat_map",
    "Generator": "from_generator",
    "DirectedInterleave": "sample_from_datasets",
    "DataServiceV2": "distribute",
}


def refuse_unserved(
    source: Source, options: PipelineOptions, traced: Traced, sample: Sample, *, count: int | None, infinite: bool
) -> None:
    """Refuses a pipeline that a service cannot run.

    Raises:
        ValueError: It has a cache or a seed, or no end; it calls Python or holds a variable; its source depends on the
            place of an element; or its arrays are too large to be sent.
    """
    if options.cache not in ("auto", None):
        _refuse("no cache", f"cache={options.cache!r}", "its workers get other examples in each epoch", "cache=None")
    if options.seed is not None:
        why = "which worker does what first differs from run to run"
        _refuse("no seed", f"seed={options.seed}", why, "seed=None")
    if infinite:
        _refuse("data that end", "an endless source", "no epoch would ever be complete", "the source without .repeat()")
    by_example = _of_examples(options, traced)
    for stage, findings in (("source", traced.in_source), ("transform", traced.in_transform), ("augment", by_example)):
        for found in findings:
            if found.kind in ("opaque", "reading", "assigning"):
                what = "calls Python" if found.kind == "opaque" else "holds a variable or a table"
                _refuse(
                    "functions of TensorFlow operations alone",
                    f"{found} in the {stage}, which {what}",
                    "it stays in this process",
                    "a source of files, such as write_records makes, and functions without Python calls",
                )
    read = source.shuffled(None) if options.shuffle and source.shuffled is not None else source.dataset()
    for name in (name for name in map(_name, lineage(read)) if name in _BY_PLACE):
        _refuse(
            "a source in which no element depends on its place",
            f"{_BY_PLACE[name]} in {source.name}",
            "each worker would do it to its own part of the data",
            "the examples as files, such as write_records makes",
        )
    size = sample.decoded_bytes * (count or 0)
    if source.resident and size > _GRAPH_BYTES:
        _refuse(
            "arrays below 2 GiB", f"{size / 2**30:.1f} GiB", "they are sent in one message", "files of write_records"
        )


def _of_examples(options: PipelineOptions, traced: Traced) -> list[Finding]:
    pairs = zip(options.augmentations, traced.in_augment, strict=True)
    return [found for function, findings in pairs if not isinstance(function, PerBatch) for found in findings]


def _name(stage: Any) -> str:
    return type(stage).__name__.removeprefix("_").removesuffix("Dataset").removesuffix("Dataset")


def _refuse(expected: str, found: str, why: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"A pipeline on a tf.data service expects {expected}. Found: {found}; {why}. What to do: pass {remedy}, or "
        "leave out `service`."
    )
