"""The part of a source that each of several training processes reads, and the steps that all of them take.

TensorFlow would have each process read everything and keep some, or divide whole files, while Keras counts the steps of
all examples: those of the larger files would never be read. So each process reads its own part, and TensorFlow divides
nothing.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.shared.elements import at_most, element_of, without_autograph
from tfopt.pipelines.shared.nondeterminism import Finding
from tfopt.pipelines.shared.options import PipelineOptions, Remainder, choose_remainder
from tfopt.pipelines.sources.reach import those_with
from tfopt.pipelines.sources.shapes import some_of
from tfopt.pipelines.sources.source import Source, expect_lasting, held_on_host

IN_PARTS = "_tfopt_in_parts"
"""An attribute of distributed datasets that hold a part of a source: which one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this process reads of a source, and how many steps all processes take."""

    source: Source  # the whole one, which must be the same in all processes
    index: int  # which part, from 0
    parts: int  # one per process
    block: int  # neighbouring examples that go to one process
    size: int  # examples of each batch that this process reads
    replica_size: int  # those that go to each of its replicas
    counts: tuple[int, ...]  # examples of each part
    batches: int  # batches of `size` in this part; the last one may be smaller
    steps: int  # per epoch, the same in all processes; a process whose part has ended contributes no examples
    last_batch: tuple[Remainder, str]  # as in Facts
    mixes: tuple["Part", ...] = ()  # of a mixture: what this process reads of each of its parts
    chosen: str = ""  # of a part of a mixture: a hash of the positions, if the mixture's turns choose them

    def __str__(self) -> str:
        return f"this process has part {self.index + 1} of {self.parts}, {self.size:,} examples of each batch"

    @property
    def whole(self) -> int:
        """Examples of all parts."""
        return sum(self.counts)

    @property
    def used(self) -> int:
        """Examples that full batches of this part take."""
        return self.size * self.batches


def own_seed(seed: int | None, part: Part | None) -> int | None:
    """Returns this process' seed: with a common one, all would draw the same augmentation at the same time."""
    if seed is None or part is None:
        return seed
    return int(np.random.SeedSequence((seed, part.index)).generate_state(1)[0] >> 1)


def take_part(source: Source, options: PipelineOptions, *, one_by_one: bool = False) -> tuple[Source, Part | None]:
    """Returns what this process reads of a source; all of it, and None, if it trains alone.

    Without a shuffle each batch is divided in blocks: the processes' outputs in turn are then in the source's order.
    `one_by_one` deals out single examples all the same.
    """
    index, parts = _place()
    if parts == 1:
        return source, None
    expect_lasting(source, "for each of several processes, which divide it")
    _refuse_options(options, tf.distribute.get_strategy().num_replicas_in_sync)
    exact = options.service is None
    block = 1 if options.shuffle or one_by_one or not exact else options.batch_size // parts
    divided = _exactly(source, parts, block) if exact else _divided(source, parts)
    counts = [each.count or 0 for each in divided]
    # By the counts alone, which all processes share; samples of their parts differ.
    part = part_of(source, options, index, counts, block, mixed=not exact or source.at is not None)
    return divided[index], part


def take_positions(source: Source, part: Part, positions: Any) -> tuple[Source, Part]:
    """Returns the elements at these positions of a source that begins again at its end, and a part of it that says so.

    Args:
        source: The whole one.
        part: What this process would have of it otherwise.
        positions: Ascending, int64.
    """
    count, end = part.whole, int(positions[-1]) + 1 if len(positions) else 0
    is_chosen = np.zeros(end, bool)
    is_chosen[positions] = True

    def position(number: Any) -> Any:
        return tf.gather(held_on_host(lambda: tf.constant(positions % count)), number)

    def is_own(number: Any) -> Any:
        return tf.gather(held_on_host(lambda: tf.constant(is_chosen)), number)

    chosen = _chosen(source, len(positions), position, is_own, end=end)
    return chosen, replace(part, chosen=hashlib.sha256(positions.tobytes()).hexdigest())


def expect_alone(source: Source) -> None:
    """Refuses a source that several processes cannot divide.

    Raises:
        UnsupportedError: If several processes train together.
    """
    parts = _place()[1]
    if parts > 1:
        raise UnsupportedError(
            f"Expected a source that can be divided among {parts} processes. Found: {source.name}, which makes whole "
            "batches, and each process would train on all of them. What to do: let each process's loader read a part "
            "of its own, and pass its batches to fit with strategy.distribute_datasets_from_function; or write the "
            "examples with write_records."
        )


def mixing_place(options: PipelineOptions, found: Sequence[Part | None]) -> tuple[int, int]:
    """Returns this process' number among those that train on a mixture of parts, and how many these are.

    Refuses options that several processes cannot have, and parts that were planned for others.
    """
    place = _place()
    if any(place != ((0, 1) if part is None else (part.index, part.parts)) for part in found):
        raise UnsupportedError(
            "Expected all parts of a mixture to be planned where the mixture is. Found one planned outside of its "
            "strategy's scope, or inside of another's. What to do: call plan_pipeline and mix inside the same `with "
            "strategy.scope():`."
        )
    if place != (0, 1):
        _refuse_options(options, tf.distribute.get_strategy().num_replicas_in_sync)
    return place


def part_of(
    source: Source,
    options: PipelineOptions,
    index: int,
    counts: Sequence[int],
    block: int = 1,
    *,
    mixed: bool,
    mixes: tuple[Part, ...] = (),
) -> Part:
    """Returns a part, given how many examples each has, and whether each epoch leaves out others.

    Of a mixture, `mixes` says what this process reads of each of its parts.
    """
    parts = len(counts)
    size = options.batch_size // parts
    left_out = sum(counts) - parts * (min(counts) // size * size)
    last_batch = choose_remainder(options, sum(counts), left_out, mixed=mixed)
    drops = last_batch[0] == "drop"
    batches = [count // size if drops else -(-count // size) for count in counts]
    steps = min(batches) if drops else max(batches)
    if not steps:
        raise PipelineError(
            f"Expected {size} examples in each of {parts} processes, with remainder='drop'. {source.name} has "
            f"{min(counts)} for one of them: there would be zero steps. What to do: pass a smaller batch_size, or "
            "remainder='keep'."
        )
    return Part(
        source=source,
        index=index,
        parts=parts,
        block=block,
        size=size,
        replica_size=options.batch_size // tf.distribute.get_strategy().num_replicas_in_sync,
        counts=tuple(counts),
        batches=min(batches[index], steps),
        steps=steps,
        last_batch=last_batch,
        mixes=mixes,
    )


def distributed(dataset: Any, part: Part) -> Any:
    """Returns a part's batches as `fit` takes them under the strategy, split over this process' replicas.

    The strategy would take the batches of a `tf.data.Dataset` for global ones and split each over P steps, while Keras
    counts one step for each and leaves the rest unread.
    """
    if _place() != (part.index, part.parts):
        raise _no_strategy(part.parts)

    def here(context: Any) -> Any:
        del context
        replicas = replica_batches(dataset, part).prefetch(tf.data.AUTOTUNE)
        # Keras counts steps; TensorFlow counts the replicas' batches, of this process only.
        replicas.cardinality = lambda: tf.constant(part.steps, tf.int64)
        return replicas

    found = tf.distribute.get_strategy().distribute_datasets_from_function(here)
    setattr(found, IN_PARTS, part)
    return found


def replica_batches(dataset: Any, part: Part) -> Any:
    """Returns a part's batches split into those of this process' replicas.

    An `augment` that adds examples to a batch is refused: there would be more of them than steps, and those at the end
    would never be read.
    """
    if part.size == part.replica_size:
        return dataset
    what_for = f"{part.size // part.replica_size} replicas in each of several processes"

    @without_autograph
    def counted(*batch: Any) -> Any:
        dense = next((leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)), None)
        if dense is not None:
            known = dense.shape[0] if dense.shape.rank else None
            at_most(part.size, known or tf.shape(dense)[0], what_for)
        return element_of(batch, dataset.element_spec)

    return dataset.map(counted).rebatch(part.replica_size)


def worker_place(strategy: Any) -> tuple[int, int]:
    """Returns this process' number among those that train together under a strategy, and how many there are."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        resolver = strategy.cluster_resolver
        spec = resolver.cluster_spec()
        # Those that train, in TensorFlow's order; an evaluator does not.
        tasks = [(job, task) for job in ("chief", "worker") if job in spec.jobs for task in spec.task_indices(job)]
        place = (resolver.task_type, resolver.task_id)
        return (tasks.index(place), len(tasks)) if place in tasks else (0, 1)
    return 0, 1


def _place() -> tuple[int, int]:
    """Returns what `worker_place` does under the current strategy, without which several processes are refused."""
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return worker_place(strategy)
    found = len({device.name.split("/device:")[0] for device in tf.config.list_logical_devices("CPU")})
    if found > 1:
        raise _no_strategy(found)
    return 0, 1


def _no_strategy(processes: int) -> UnsupportedError:
    return UnsupportedError(
        f"Expected a pipeline inside the scope of the strategy of its {processes} processes. Found: "
        f"{type(tf.distribute.get_strategy()).__name__}, under which each would train on all examples. What to do: "
        "plan and build it inside `with strategy.scope():` of a MultiWorkerMirroredStrategy, such as "
        "tfopt.distribute.strategy() returns."
    )


def expect_one_order(source: Source, in_source: Sequence[Finding], where: str) -> None:
    """Refuses to divide a source by position if its order may differ between processes or reads."""
    for found in in_source:
        if found.reorders:
            raise UnsupportedError(
                f"Expected a source that has the same order {where}. Found {found} in {source.name}: some "
                "examples would be in both parts, and others in neither. What to do: take it out, and leave the order "
                "to `shuffle`."
            )


def _exactly(source: Source, parts: int, block: int) -> list[Source]:
    """Divides a source so that no part has more than one block more than another, as whole files might."""
    count = source.count if source.count is not None else int(source.dataset().cardinality())
    if count < 0:
        raise UnsupportedError(
            f"Expected a known number of examples, since each of {parts} processes takes a part and all take the same "
            f"steps. Found: {source.name}, whose number is unknown or endless. What to do: apply "
            "tf.data.experimental.assert_cardinality(number), give your own Source a `count`, or take out repeat()."
        )
    if block == 1 and source.part is not None and count >= parts:  # else some would be empty, and none be looked at
        try:
            divided = [source.part(index, parts) for index in range(parts)]
        except PipelineError:  # fewer files than processes
            divided = []
        counts = [each.count or 0 for each in divided]
        if divided and sum(counts) == count and max(counts) <= min(counts) + 1:
            return divided
    return [_by_position(source, index, parts, block, count) for index in range(parts)]


def own_count(count: int, block: int, index: int, parts: int) -> int:
    """Returns how many of so many elements are in block `index` of each `parts` blocks."""
    turns, tail = divmod(count, block * parts)
    return turns * block + min(max(tail - index * block, 0), block)


def _by_position(source: Source, index: int, parts: int, block: int, count: int) -> Source:
    """Returns block `index` of each `parts` blocks of a source; without `at`, all raw elements are read for it."""

    def position(number: Any) -> Any:
        return (number // block * parts + index) * block + number % block

    def is_own(number: Any) -> Any:
        return tf.equal(number // block % parts, index)

    return _chosen(source, own_count(count, block, index, parts), position, is_own)


def _chosen(
    source: Source, own: int, position: Callable[[Any], Any], is_own: Callable[[Any], Any], *, end: int | None = None
) -> Source:
    """Returns `own` elements of a source, which begins again until `end` if that is given.

    Args:
        position: Given their number, returns their position.
        is_own: Given the position of an element, returns whether it is one of them.
    """
    again = source if end is None else replace(source, dataset=lambda: source.dataset().repeat().take(end))
    # A sample of all examples, so that all processes plan alike.
    sample = source.sample or (lambda limit: source.dataset().take(limit))
    return replace(some_of(again, own, position, is_own), sample=sample, part=None, packed=None)


def _divided(source: Source, parts: int) -> list[Source]:
    if source.part is None:
        raise UnsupportedError(
            f"Expected a source that can be divided among {parts} processes: {those_with('part')}. Found: "
            f"{source.name}. What to do: write its examples with write_records, or give your own Source a `part`."
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
            f"Expected a batch_size that splits evenly over the {replicas} replicas of several "
            f"processes. Found: {options.batch_size}. What to do: pass "
            f"{max(1, options.batch_size // replicas) * replicas}."
        )
    if options.remainder == "pad":
        raise ValueError(
            "Expected remainder='drop' or 'keep' where several processes train together. Found: 'pad', whose "
            "weights account for one process' batch only. What to do: pass 'keep', which gives every example of a "
            "smaller last batch the same weight in all processes."
        )
    if options.device not in ("auto", None):
        raise ValueError(
            f"Expected no `device` where several processes train together. Found: {options.device!r}. What "
            "to do: leave it out; the strategy copies the batches to its devices."
        )
