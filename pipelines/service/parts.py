"""The part of the data that this process trains on, where several train together on a tf.data service.

A part is made before the service is asked: process p of P takes the elements p, p+P, … of the source, with a job of its
own. Tried before: one job for all. Each example came to one process, but how many came to which, and so the number of
steps, differed by the epoch, and Keras holds to the number of the first.
"""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.sources.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this process reads of a source, and how many steps all processes take.

    Args:
        index: Which of the parts it is, from 0.
        parts: How many there are: one for each process.
        size: How many of a batch's examples come from this process.
        replica_size: How many of them go to each of its replicas.
        whole: How many examples all parts have.
        batches: How many batches of `size`, the last one perhaps smaller, this part has.
        steps: How many steps an epoch has; the same in all processes. One whose part has ended gives no examples.
    """

    index: int
    parts: int
    size: int
    replica_size: int
    whole: int
    batches: int
    steps: int

    def __str__(self) -> str:
        return f"this process has part {self.index + 1} of {self.parts}, {self.size:,} examples of each batch"


def take_part(source: Source, options: PipelineOptions) -> tuple[Source, Part | None]:
    """Returns what this process reads of a source; all of it, and None, where it trains alone.

    Raises:
        ValueError: The batch does not split evenly over the replicas, or an option cannot be kept up.
        UnsupportedError: The source has no parts, or it is not clear how the processes train together.
        PipelineError: There are too few examples or files.
    """
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
    part = Part(
        index=index,
        parts=parts,
        size=size,
        replica_size=options.batch_size // replicas,
        whole=sum(counts),
        batches=min(batches[index], steps),
        steps=steps,
    )
    if not steps:
        raise PipelineError(
            f"Expected {size} examples in each of {parts} processes, with remainder='drop'. {source.name} has "
            f"{min(counts)} for one of them: there would be zero steps. What to do: pass a smaller batch_size, or "
            "remainder='keep'."
        )
    return divided[index], part


def distributed(dataset: Any, part: Part) -> Any:
    """Returns the batches of a part as `fit` takes them under the strategy, split over this process's replicas.

    Not as a `tf.data.Dataset`: the strategy takes its batches for global ones and splits each over P steps, while Keras
    counts one step for each, and would leave the rest of the part unread.

    Raises:
        UnsupportedError: It is called outside of the strategy's scope.
    """
    if _place() != (part.index, part.parts):
        raise _no_strategy(part.parts)

    def here(context: Any) -> Any:
        del context
        replicas = dataset if part.size == part.replica_size else dataset.rebatch(part.replica_size)
        replicas = replicas.prefetch(tf.data.AUTOTUNE)
        # What Keras counts are steps, TensorFlow the batches of replicas, and of this process alone.
        replicas.cardinality = lambda: tf.constant(part.steps, tf.int64)
        return replicas

    return tf.distribute.get_strategy().distribute_datasets_from_function(here)


def _place() -> tuple[int, int]:
    """Returns which of the processes that train together this one is, and how many there are."""
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
        "to do: make the plan, and build it, inside `with strategy.scope():` of a MultiWorkerMirroredStrategy, such "
        "as tfopt.distribute.strategy() returns."
    )


def _divided(source: Source, parts: int) -> list[Source]:
    """Returns all parts of a source."""
    if source.part is None:
        raise UnsupportedError(
            f"Expected a source that can be divided among {parts} processes: arrays, .npy files, images or files of "
            f"records. Found: {source.name}. What to do: write its examples with write_records, or give a Source of "
            "your own a `part`."
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
            "which weighs the examples of one process's batch alone. What to do: pass 'keep', under which a smaller "
            "last batch weighs its examples alike in all processes."
        )
    if options.device not in ("auto", None):
        raise ValueError(
            "Expected no `device` where several processes train on a tf.data service. Found: "
            f"{options.device!r}. What to do: leave it out; the strategy copies the batches to its devices."
        )
