"""The training process' side of a tf.data service: its part of the data, what it refuses, and the batches it gets.

Where several processes train together, process p of P reads the elements p, p+P, … of the source, with a job of its
own. One shared job was tried first: each example came to one process, but how many came to which differed between
epochs, and so did the number of steps, while Keras keeps to the first epoch's number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.service.relay import Relay, find_workers, relay_to
from tfopt.pipelines.shared.nondeterminism import Finding, lineage
from tfopt.pipelines.shared.options import PipelineOptions, Remainder, choose_remainder
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this process reads of a source, and how many steps all processes take."""

    index: int  # which part, from 0
    parts: int  # one per process
    size: int  # examples of each batch that this process reads
    replica_size: int  # those that go to each of its replicas
    whole: int  # examples of all parts
    batches: int  # batches of `size` in this part; the last one may be smaller
    steps: int  # per epoch, the same in all processes; a process whose part has ended contributes no examples
    last_batch: tuple[Remainder, str]  # as in Facts

    def __str__(self) -> str:
        return f"this process has part {self.index + 1} of {self.parts}, {self.size:,} examples of each batch"


def take_part(source: Source, options: PipelineOptions) -> tuple[Source, Part | None]:
    """Returns what this process reads of a source; all of it, and None, if it trains alone."""
    index, parts = _place()
    if parts == 1:
        return source, None
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    _refuse_options(options, replicas)
    divided = _divided(source, parts)
    counts = [each.count or 0 for each in divided]
    size = options.batch_size // parts
    full = min(counts) // size
    # By the counts alone, which all processes share; samples of their parts differ.
    last_batch = choose_remainder(options, sum(counts), sum(counts) - parts * full * size, mixed=True)
    drops = last_batch[0] == "drop"
    batches = [count // size if drops else -(-count // size) for count in counts]
    steps = min(batches) if drops else max(batches)
    if not steps:
        raise PipelineError(
            f"Expected {size} examples in each of {parts} processes, with remainder='drop'. {source.name} has "
            f"{min(counts)} for one of them: there would be zero steps. What to do: pass a smaller batch_size, or "
            "remainder='keep'."
        )
    part = Part(
        index=index,
        parts=parts,
        size=size,
        replica_size=options.batch_size // replicas,
        whole=sum(counts),
        batches=min(batches[index], steps),
        steps=steps,
        last_batch=last_batch,
    )
    return divided[index], part


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
                what = "calls Python" if found.kind == "opaque" else "holds a variable or a table"
                _refuse(
                    "functions of TensorFlow operations only",
                    f"{found} in the {stage}, which {what}",
                    "that stays in this process",
                    "a source of files, such as write_records makes, and functions without Python calls",
                )
    read = source.shuffled(None) if options.shuffle and source.shuffled is not None else source.dataset()
    for stage in lineage(read):
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


def describe_service(options: PipelineOptions, part: Part | None) -> str:
    """Returns the plan's line about the service; raises PipelineError if it does not answer."""
    workers = len(find_workers(_relay(options).dispatcher, "service"))
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
    distribute = tf.data.experimental.service.distribute("distributed_epoch", _PREFIX + _relay(options).address)
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


def distributed(dataset: Any, part: Part) -> Any:
    """Returns a part's batches as `fit` takes them under the strategy, split over this process' replicas.

    The strategy would take the batches of a `tf.data.Dataset` for global ones and split each over P steps, while Keras
    counts one step for each and leaves the rest unread.
    """
    if _place() != (part.index, part.parts):
        raise _no_strategy(part.parts)

    def here(context: Any) -> Any:
        del context
        replicas = dataset if part.size == part.replica_size else dataset.rebatch(part.replica_size)
        replicas = replicas.prefetch(tf.data.AUTOTUNE)
        # Keras counts steps; TensorFlow counts the replicas' batches, of this process only.
        replicas.cardinality = lambda: tf.constant(part.steps, tf.int64)
        return replicas

    return tf.distribute.get_strategy().distribute_datasets_from_function(here)


def _place() -> tuple[int, int]:
    """Returns this process' number among those that train together, and how many there are."""
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        resolver = strategy.cluster_resolver
        spec = resolver.cluster_spec()
        # Those that train, in TensorFlow's order; an evaluator does not.
        tasks = [(job, task) for job in ("chief", "worker") if job in spec.jobs for task in spec.task_indices(job)]
        place = (resolver.task_type, resolver.task_id)
        return (tasks.index(place), len(tasks)) if place in tasks else (0, 1)
    found = len({device.name.split("/device:")[0] for device in tf.config.list_logical_devices("CPU")})
    if found > 1:
        raise _no_strategy(found)
    return 0, 1


def _no_strategy(processes: int) -> UnsupportedError:
    return UnsupportedError(
        f"Expected a pipeline on a tf.data service inside the scope of the strategy of its {processes} processes. "
        f"Found: {type(tf.distribute.get_strategy()).__name__}, under which each would train on all examples. What "
        "to do: plan and build it inside `with strategy.scope():` of a MultiWorkerMirroredStrategy, such as "
        "tfopt.distribute.strategy() returns."
    )


def _divided(source: Source, parts: int) -> list[Source]:
    if source.part is None:
        raise UnsupportedError(
            f"Expected a source that can be divided among {parts} processes: arrays, .npy files, images or files of "
            f"records. Found: {source.name}. What to do: write its examples with write_records, or give your own "
            "Source a `part`."
        )
    divided = [source.part(index, parts) for index in range(parts)]
    if any(each.count is None for each in divided):
        raise UnsupportedError(
            f"Expected a known number of examples in each of {parts} parts, since all processes take the same steps. "
            f"Found: {source.name}, whose number is unknown. What to do: write them with write_records, or "
            "uncompressed."
        )
    if not all(each.count for each in divided):
        raise PipelineError(
            f"Expected examples for each of {parts} processes. Found: {source.count} in {source.name}. What to do: "
            "train in fewer processes."
        )
    return divided


def _refuse_options(options: PipelineOptions, replicas: int) -> None:
    if options.batch_size % replicas:
        raise ValueError(
            f"Expected a batch_size that splits evenly over the {replicas} replicas of several processes on a tf.data "
            f"service. Found: {options.batch_size}. What to do: pass "
            f"{max(1, options.batch_size // replicas) * replicas}."
        )
    if options.remainder == "pad":
        raise ValueError(
            "Expected remainder='drop' or 'keep' where several processes train on a tf.data service. Found: 'pad', "
            "whose weights know one process' batch only. What to do: pass 'keep', under which the examples of a "
            "smaller last batch weigh the same in all processes."
        )
    if options.device not in ("auto", None):
        raise ValueError(
            "Expected no `device` where several processes train on a tf.data service. Found: "
            f"{options.device!r}. What to do: leave it out; the strategy copies the batches to its devices."
        )


def _relay(options: PipelineOptions) -> Relay:
    return relay_to(str(options.service).removeprefix(_PREFIX))


def _refuse(expected: str, found: str, why: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"A pipeline on a tf.data service expects {expected}. Found: {found}; {why}. What to do: pass {remedy}, or "
        "leave out `service`."
    )
