"""Decides from what all workers say whether `fit` would train on every example once."""

from collections.abc import Sequence
from dataclasses import dataclass

from tfopt.distribute.data_check.reading import Reading
from tfopt.distribute.data_check.samples import differ

_SAME = (
    "pass the same whole dataset, in the same order, in every worker, and TensorFlow gives each its part; or let "
    "build_pipeline divide it. For data that each worker has alone, use strategy.distribute_datasets_from_function."
)
_EXPECTED = "Expected all workers to pass the same data to fit, since TensorFlow gives each worker a part of it."
_SAME_SOURCE = (
    "pass build_pipeline the same whole source, in the same order, and the same options in every worker, and it gives "
    "each its part. For data that each worker has alone, use strategy.distribute_datasets_from_function."
)
_EXPECTED_SOURCE = (
    "Expected build_pipeline to get the same source in all workers, since it gives each worker a part of it."
)
_DIVIDED = (
    "TensorFlow gives workers whole files, so if these differ in size, the larger ones are not read to the end. What "
    "to do: let build_pipeline divide the data, or set tf.data.experimental.AutoShardPolicy.DATA."
)
_OWN = (
    "With AutoShardPolicy.OFF, TensorFlow makes one step per worker of each batch, which Keras counts as one step, and "
    "the rest of the data is never read. What to do: leave out AutoShardPolicy.OFF if all workers have the "
    "same data; otherwise use strategy.distribute_datasets_from_function, with the same number of batches in each "
    "worker."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with the data."""

    text: str = ""
    """What was expected, what was found and what to do; "" if nothing is wrong."""
    refused: bool = True
    """Whether it is certain; otherwise it is worth a warning."""
    unless_random: bool = False
    """Whether it holds only if the data are the same each time they are read."""


def judge_start(readings: Sequence[Reading]) -> Verdict:
    """Judges the data before the first step, given the reading of each worker."""
    same = _SAME_SOURCE if readings[0].by_pipeline else _SAME
    if len({reading.steps for reading in readings}) > 1:
        found = _listed([f"{reading.steps} in worker {index}" for index, reading in enumerate(readings)])
        return Verdict(
            f"Expected the same number of steps per epoch in all workers. Found: {found}. Workers with "
            f"fewer steps would leave the others waiting. What to do: {same}"
        )
    if any(reading.in_threads and not reading.endless for reading in readings):
        return Verdict(
            "Expected a PyDataset that Keras reads in one thread. Found: workers > 1 or use_multiprocessing=True, with "
            "which Keras leaves out some batches of an epoch and repeats others when several processes train. What to "
            "do: pass workers=1 and use_multiprocessing=False to the PyDataset, or let build_pipeline read the data."
        )
    if not all(reading.divided for reading in readings):
        return _judge_own(readings)
    return _judge_divided(readings)


def _judge_own(readings: Sequence[Reading]) -> Verdict:
    """Judges data that TensorFlow does not divide."""
    workers: dict[str, int] = {}
    for index, reading in enumerate(readings):
        other = workers.setdefault(reading.first, index)
        if reading.first and other != index:
            return Verdict(
                "Expected other examples in each worker, since TensorFlow does not divide this data (its "
                "AutoShardPolicy is OFF, or a function of your own makes it). Found: the same first batch in workers "
                f"{other} and {index}, which would train on the same examples. What to do: leave out "
                "AutoShardPolicy.OFF, and TensorFlow gives each worker its part; or use "
                "dataset.shard(context.num_input_pipelines, context.input_pipeline_id) in the function."
            )
    return Verdict()


def _judge_divided(readings: Sequence[Reading]) -> Verdict:
    """Judges data of which each worker gets a part, and which must therefore be the same in all."""
    first = readings[0]
    expected, same = (_EXPECTED_SOURCE, _SAME_SOURCE) if first.by_pipeline else (_EXPECTED, _SAME)
    refused = not first.endless
    for index, reading in enumerate(readings[1:], 1):
        found = _other_stage(first, reading, index)
        if found or reading.examples != first.examples:
            found = found or f"{first.examples} examples in worker 0, {reading.examples} in worker {index}"
            return Verdict(f"{expected} Found: {found}. What to do: {same}", refused)
    for name, values in first.stages:
        if "seed" in name and values in ([], [0, 0]):
            return Verdict(
                f"{expected} Found: a shuffle without a seed, which gives each worker another order: some examples "
                "would be seen twice, others never. What to do: pass `seed` to shuffle, or call "
                "keras.utils.set_random_seed with the same number in all workers.",
                refused,
            )
    for index, reading in enumerate(readings[1:], 1):
        for (repeatable, ours), (_, theirs) in zip(first.sources, reading.sources, strict=True):
            others = differ(ours, theirs)
            if any(others) and (repeatable or all(others)):
                return Verdict(
                    f"{expected} Found: other examples in worker {index} than in worker 0, or another order: were they "
                    f"divided, or drawn or shuffled without a seed? What to do: {same}",
                    refused and all(others),
                    unless_random=not repeatable,
                )
    return Verdict()


def _other_stage(first: Reading, reading: Reading, index: int) -> str:
    """Names the first stage in which two workers' datasets differ."""
    for one, other in zip(first.stages, reading.stages, strict=False):
        if one != other:
            return f"{_stage(*one)} in worker 0, {_stage(*other)} in worker {index}"
    if len(first.stages) == len(reading.stages):
        return ""
    longer, where = (first, 0) if len(first.stages) > len(reading.stages) else (reading, index)
    return f"{_stage(*longer.stages[min(len(first.stages), len(reading.stages))])} in worker {where} only"


def _stage(name: str, values: Sequence[int]) -> str:
    return f"{name}({', '.join(map(str, values))})"


def judge_epoch(readings: Sequence[Reading], counted: Sequence[int]) -> Verdict:
    """Judges an epoch that read all data, given how many examples each worker's replicas have seen."""
    first, expected = readings[0], _expected(readings)
    if expected is None or sum(counted) == expected:
        return Verdict()
    in_step = sum(reading.in_step for reading in readings)
    if not first.certain and in_step != min(first.batch_size or 0, expected):  # a `map` changes the size of batches
        return Verdict()
    return Verdict(f"{_counts(expected, counted)} {_DIVIDED if first.divided else _OWN}", first.certain)


def _expected(readings: Sequence[Reading]) -> int | None:
    first = readings[0]
    if first.divided:
        return first.examples
    own = [reading.examples for reading in readings]
    return None if None in own else sum(examples or 0 for examples in own)


def judge_generator(yielded: int, counted: Sequence[int]) -> Verdict:
    """Judges a Python generator that has ended, given how many examples it yielded in this worker."""
    if sum(counted) == yielded:
        return Verdict()
    return Verdict(
        f"{_counts(yielded, counted)} Keras reads from a generator to build the model, and those examples are "
        "lost. What to do: pass tf.data.Dataset.from_generator with a function that returns the generator, a "
        "PyDataset, or an endless generator with steps_per_epoch."
    )


def _counts(expected: int, counted: Sequence[int]) -> str:
    found = _listed([f"{count:,} in worker {index}" for index, count in enumerate(counted)])
    return (
        f"Expected {expected:,} examples in the epoch of all workers together. Found: {sum(counted):,} ({found}), as "
        "the replicas counted them."
    )


def _listed(parts: Sequence[str], most: int = 8) -> str:
    return ", ".join(parts[:most]) + (", …" if len(parts) > most else "")
