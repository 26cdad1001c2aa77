"""The training process' side of a tf.data service: what it refuses, and the batches it gets.

Where several processes train together, each has a job of its own on its part of the source. One shared job was tried
first: each example came to one process, but how many came to which differed between epochs, and so did the number of
steps, while Keras keeps to the first epoch's number.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.service.process import relay_to
from tfopt.pipelines.service.relay import find_workers
from tfopt.pipelines.shared.nondeterminism import Finding, lineage, runs_python
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.sources.parts import Part
from tfopt.pipelines.sources.source import Source

_PREFIX = "grpc://"
_GRAPH_BYTES = 2**31 - 2**24  # a graph is one protobuf message of at most 2 GiB; 16 MiB are left for the rest of it
# Each worker applies these to its own share of the data: three workers skip three times as many elements, and zip
# elements that do not belong together.
_POSITIONAL = {
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
    source: Source,
    options: PipelineOptions,
    *,
    in_source: Sequence[Finding],
    in_transform: Sequence[Finding],
    in_augment: Sequence[Sequence[Finding]],
    decoded_bytes: float,
    infinite: bool,
) -> None:
    """Refuses a pipeline that a service cannot run, or would run wrong; what its functions do is in the findings."""
    if options.cache not in ("auto", None):
        _refuse("no cache", f"cache={options.cache!r}", "its workers get other examples in each epoch", "cache=None")
    if options.seed is not None:
        why = "which worker does what first differs from run to run"
        _refuse("no seed", f"seed={options.seed}", why, "seed=None")
    if infinite:
        _refuse("finite data", "an endless source", "no epoch would ever end", "the source without .repeat()")
    # Functions of batches run in this process.
    functions = zip(options.augmentations, in_augment, strict=True)
    served = [found for function, each in functions if not function.by_batch for found in each]
    for stage, findings in (("source", in_source), ("transform", in_transform), ("augment", served)):
        for found in findings:
            if found.kind in ("opaque", "reading", "assigning"):
                _refuse_staying(
                    f"{found} in the {stage}, which "
                    f"{'calls Python' if found.kind == 'opaque' else 'holds a variable or a table'}"
                )
    read = source.shuffled(None) if options.shuffle and source.shuffled is not None else source.dataset()
    for stage in lineage(read):
        if runs_python(stage):
            _refuse_staying(f"{source.name}, which calls Python")
        name = type(stage).__name__.removeprefix("_").removesuffix("Dataset").removesuffix("Dataset")
        if name in _POSITIONAL:
            _refuse(
                "a source that does not count elements",
                f"{_POSITIONAL[name]} in {source.name}",
                "each worker would apply it to its own share of the data",
                "the examples as files, such as write_records makes",
            )
    if source.resident and decoded_bytes > _GRAPH_BYTES:
        size = f"{decoded_bytes / 2**30:.1f} GiB"
        _refuse("arrays below 2 GiB", size, "they are sent in one message", "files of write_records")


def _refuse_staying(found: str) -> NoReturn:
    _refuse(
        "functions of TensorFlow operations only",
        found,
        "that stays in this process",
        "a source of files, such as write_records makes, and functions without Python calls",
    )


def describe_service(options: PipelineOptions, part: Part | None) -> str:
    """Returns the plan's line about the service; raises PipelineError if it does not answer."""
    workers = len(find_workers(_dispatcher(options), "service"))
    registered = f"{workers} worker{'s' * (workers != 1)} there" if workers else "no worker there yet"
    return (
        f"{registered}: the stages above run on them, and each example comes from one of them once per epoch; losing a "
        f"worker or the dispatcher ends the epoch with an error{'' if part is None else f'; {part}'}"
    )


def from_service(
    dataset: Any, options: PipelineOptions, part: Part | None, *, full_batches: bool, steps: int | None
) -> Any:
    """Returns the batches of `dataset` as the service's workers prepare them, each example once per epoch.

    A worker's last batch may be smaller; it is filled up here with examples of the others. `steps` per epoch are None
    if unknown; a `part` knows its own.
    """
    settings = tf.data.Options()
    settings.deterministic = False
    # Random operations without a fixed seed hold state, which must not be shipped.
    settings.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    distribute = tf.data.experimental.service.distribute("distributed_epoch", _PREFIX + relay_to(_dispatcher(options)))
    try:
        served = dataset.prefetch(tf.data.AUTOTUNE).with_options(settings).apply(distribute)
    except (tf.errors.OpError, ValueError) as error:
        raise PipelineError(
            f"Expected the tf.data service at {options.service} to accept the pipeline. Found: {error}. What to do: "
            "use TensorFlow operations only, without variables and tables, and run the same TensorFlow version there."
        ) from error
    served = served.rebatch(options.batch_size if part is None else part.size, drop_remainder=full_batches)
    batches = steps if part is None else part.batches
    if batches is not None:
        # `take` ends the epoch without waiting for the service to notice; too few batches are an error at its end.
        served = served.take(batches).apply(tf.data.experimental.assert_cardinality(batches))
    return served


def _dispatcher(options: PipelineOptions) -> str:
    return str(options.service).removeprefix(_PREFIX)


def _refuse(expected: str, found: str, why: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"A pipeline on a tf.data service expects {expected}. Found: {found}; {why}. What to do: pass {remedy}, or "
        "leave out `service`."
    )
