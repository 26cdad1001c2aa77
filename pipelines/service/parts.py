"""The part of the data that this process reads where several processes train together on a tf.data service.

Process p of P reads the elements p, p+P, … of the source, with a job of its own. One shared job was tried first: each
example came to one process, but how many came to which differed between epochs, and so did the number of steps, while
Keras keeps to the first epoch's number.
"""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.sources.source import Source


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
    drops = options.remainder == "drop"
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
    )
    return divided[index], part


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
    """Returns all parts of a source."""
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
