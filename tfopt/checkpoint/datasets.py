"""Whether, and how, a position in a dataset can be found again in another process."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context

from tfopt.errors import UnsupportedError
from tfopt.pipelines.plan import PipelinePlan, plan_of
from tfopt.pipelines.shared.frozen_draws import nodes
from tfopt.pipelines.shared.nondeterminism import find_in_dataset, find_states, lineage
from tfopt.pipelines.shared.position import START
from tfopt.pipelines.stages.example_stages import Cache
from tfopt.pipelines.stages.stage import all_of

_COUNTER = b"@@epoch_num_random_samples"  # in the state of an iterator, of each shuffle
_DRAWING = ("ShuffleDataset", "RandomDataset")
_MOST_EARLIER = 4  # iterations of a pipeline before `fit`
_COMPARED = 4  # batches


def exact_plan(dataset: Any) -> PipelinePlan | None:
    """Returns the plan of a dataset if its pipeline can be built from any position without rereading everything.

    A cache in memory has to be filled again anyway, and reading it repeatedly then costs little.
    """
    plan = plan_of(dataset)
    if plan is None or plan.position != START:
        return None
    if any(isinstance(stage, Cache) and stage.choice.on == "memory" for stage in all_of(plan.stages)):
        return None
    return plan if _is_repeatable(plan) else None


def _is_repeatable(plan: PipelinePlan) -> bool:
    try:
        plan.at()
    except UnsupportedError:
        return False
    return True


def few_of(batches: Iterable[Any]) -> list[Any]:
    """Returns the first batches of an iteration, enough to tell it from others: the very first ones may be alike."""
    return list(itertools.islice(batches, _COMPARED))


def iterations_before(
    plan: PipelinePlan, opened: int, read: int, first: Any, first_of: Callable[[Any], Any]
) -> tuple[int, int] | None:
    """Returns how many iterations of a pipeline were begun and read so far; None if unknown.

    Before `fit` a pipeline may have been iterated, by the script, or by a strategy to build the model. A restarted
    script does so again, so the first batches of its next iteration tell: they are compared with those of the plan.

    Args:
        plan: From its start.
        opened: Iterations begun since `fit` began.
        read: Those of them that were read.
        first: The first batches of the next iteration.
        first_of: Returns those of the first iteration of a dataset.
    """
    for earlier in range(_MOST_EARLIER):
        for read_earlier in range(earlier, -1, -1):
            begun = opened + earlier, read + read_earlier
            if _same(first, first_of(plan.at(begun[1], opened=begun[0]).build())):
                return begun
    return None


def _same(one: Any, other: Any) -> bool:
    ones, others = ([leaf.numpy() for leaf in tf.nest.flatten(value, expand_composites=True)] for value in (one, other))
    return len(ones) == len(others) and all(map(np.array_equal, ones, others))


def obstacle(adapter: Any, dataset: Any) -> str | None:
    """Returns why neither an iterator's state nor skipping leads to a position; None if one of them may."""
    if isinstance(adapter, ArrayDataAdapter):
        return None
    if not isinstance(dataset, tf.data.Dataset):
        plan = plan_of(dataset)
        repeatable = plan is not None and _is_repeatable(plan)
        return None if repeatable else f"a {type(dataset).__name__}, which is not a tf.data.Dataset"
    states = sorted(find_states(dataset))
    return f"a dataset with {', '.join(states)}, whose state cannot be saved" if states else None


def changes(adapter: Any, dataset: Any) -> str | None:
    """Returns what makes a dataset differ from run to run; None if nothing does."""
    if isinstance(adapter, ArrayDataAdapter):
        seeded = not adapter._shuffle or context.global_seed() is not None
        return None if seeded else "arrays shuffled without a seed (keras.utils.set_random_seed)"
    if (plan := plan_of(dataset)) is not None and _is_repeatable(plan):
        return None
    if any(found.kind == "unordered" for found in find_in_dataset(dataset)):
        return "a parallel stage that does not keep the order"
    for stage in lineage(dataset):
        if any(node.op.startswith(_DRAWING) for each in stage._functions() for node in nodes(each.function)):
            return "a shuffle inside a function of a dataset"
        if _kind(stage) in _DRAWING and not (int(stage._seed) or int(stage._seed2)):
            return f"a {_kind(stage)} stage without a seed"
    return None


def all_counts(dataset: Any) -> bool:
    """Whether an iterator's order depends on everything read before, not only on how many iterators were opened.

    Of several shuffles, only the last one draws when an iterator is opened: one before it, or in the second part of a
    `concatenate`, draws when it is reached.
    """
    return len(_draws(dataset)) > 1 or _keeps_draws(dataset)


def _keeps_draws(dataset: Any) -> bool:
    """Whether a shuffle precedes a cache, which keeps its order, or a repeat, which draws a new one each time."""
    if plan_of(dataset) is not None:  # `build_pipeline` does both
        return True
    keeping = (stage for stage in lineage(dataset) if _kind(stage) in ("CacheDataset", "RepeatDataset"))
    return any(_kind(earlier) == "ShuffleDataset" for stage in keeping for earlier in lineage(stage))


def seeds_of(dataset: Any) -> list[list[int]]:
    """Returns both halves of the seed of each stage that draws; Keras' loaders of folders draw one in each process."""
    return [[int(stage._seed), int(stage._seed2)] for stage in _draws(dataset)]


def draws_by_opening(dataset: Any) -> bool:
    """Whether each new iterator of a dataset, read or not, yields another order."""
    return bool(_draws(dataset)) and not _keeps_draws(dataset)


def is_complete(state: np.ndarray, dataset: Any) -> bool:
    """Whether a state holds what each shuffle will draw next; TensorFlow leaves out one that is just exhausted."""
    shuffles = [stage for stage in lineage(dataset) if _kind(stage) == "ShuffleDataset"]
    cached = any(_kind(stage) == "CacheDataset" for stage in lineage(dataset))
    return not cached and state.tobytes().count(_COUNTER) >= len(shuffles)


def _draws(dataset: Any) -> list[Any]:
    return [stage for stage in lineage(dataset) if _kind(stage) in _DRAWING]


def _kind(stage: Any) -> str:
    return type(stage).__name__.strip("_")
