"""Whether, and how, a position in a dataset can be found again in another process."""

from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.internals.runtime import global_seed
from tfopt.internals.training import ArrayDataAdapter
from tfopt.pipelines.plan import PipelinePlan, place_of, plan_of
from tfopt.pipelines.shared.epochs import Place, Position
from tfopt.pipelines.shared.frozen_draws import nodes
from tfopt.pipelines.shared.nondeterminism import find_in_dataset, find_states, lineage
from tfopt.pipelines.stages.balance import Balance
from tfopt.pipelines.stages.from_position import batch_of, is_repeatable, ordering

_COUNTER = b"@@epoch_num_random_samples"  # in the state of an iterator, of each shuffle
_DRAWING = ("ShuffleDataset", "RandomDataset")


def exact_plan(dataset: Any) -> PipelinePlan | None:
    """Returns the plan of a dataset whose batches are the same whenever it reads from a position."""
    plan = plan_of(dataset)
    return plan if plan is not None and is_repeatable(plan.stages) else None


def places_of(dataset: Any) -> list[Place]:
    """Returns the places of the pipelines from which a dataset is made, or of the one that it is."""
    if plan_of(dataset) is not None:
        return [place_of(dataset)]
    stages = lineage(dataset) if isinstance(dataset, tf.data.Dataset) else ()
    return [place_of(stage) for stage in stages if plan_of(stage) is not None]


def order_of(plan: PipelinePlan) -> list[Any]:
    """Returns what decides a pipeline's order besides its position, as JSON values.

    Without a seed, where it is shuffled and cached may depend on free memory.
    """
    balances = [stage.summary() for stage in plan.stages if isinstance(stage, Balance)]
    return [batch_of(plan.stages).size, *balances, *([] if plan.options.seed is not None else ordering(plan.stages))]


def positions_of(positions: Iterable[Position]) -> list[list[int]]:
    """Returns the seed, epoch and batch of each position, as JSON values."""
    return [list(astuple(position)) for position in positions]


def obstacle(adapter: Any, dataset: Any) -> str | None:
    """Returns why neither an iterator's state nor skipping leads to a position; None if one of them may."""
    if isinstance(adapter, ArrayDataAdapter):
        return None
    if not isinstance(dataset, tf.data.Dataset):
        return f"a {type(dataset).__name__}, which is not a tf.data.Dataset"
    states = sorted(find_states(dataset))
    return f"a dataset with {', '.join(states)}, whose state cannot be saved" if states else None


def changes(adapter: Any, dataset: Any) -> str | None:
    """Returns what makes a dataset differ from run to run; None if nothing does."""
    if isinstance(adapter, ArrayDataAdapter):
        seeded = not adapter._shuffle or global_seed() is not None
        return None if seeded else "arrays shuffled without a seed (keras.utils.set_random_seed)"
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
    return len(drawing(dataset)) > 1 or _keeps_drawing(dataset)


def _keeps_drawing(dataset: Any) -> bool:
    """Whether a shuffle precedes a cache, which keeps its order, or a repeat, which draws a new one each time."""
    keeping = (stage for stage in lineage(dataset) if _kind(stage) in ("CacheDataset", "RepeatDataset"))
    return any(_kind(earlier) == "ShuffleDataset" for stage in keeping for earlier in lineage(stage))


def drawing(dataset: Any) -> list[Any]:
    """Returns the stages of a dataset that draw."""
    stages = lineage(dataset) if isinstance(dataset, tf.data.Dataset) else ()
    return [stage for stage in stages if _kind(stage) in _DRAWING]


def seeds_of(dataset: Any) -> list[list[int]]:
    """Returns both halves of the seed of each stage that draws, and its buffer, which is 0 if it does not shuffle.

    Keras' loaders of folders draw a seed in each process.
    """
    return [[int(stage._seed), int(stage._seed2), int(getattr(stage, "_buffer_size", 0))] for stage in drawing(dataset)]


def draws_by_opening(dataset: Any) -> bool:
    """Whether each new iterator of a dataset, read or not, yields another order."""
    return bool(drawing(dataset)) and not _keeps_drawing(dataset)


def is_complete(state: np.ndarray, dataset: Any) -> bool:
    """Whether a state holds what each shuffle will draw next; TensorFlow leaves out one that is just exhausted."""
    shuffles = [stage for stage in lineage(dataset) if _kind(stage) == "ShuffleDataset"]
    cached = any(_kind(stage) == "CacheDataset" for stage in lineage(dataset))
    return not cached and state.tobytes().count(_COUNTER) >= len(shuffles)


def _kind(stage: Any) -> str:
    return type(stage).__name__.strip("_")
