"""`profile_pipeline()`: what each stage of an input pipeline costs, and which one limits it."""

import numbers
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.hardware import host
from tfopt.pipelines.cache.writer import read_index
from tfopt.pipelines.plan import PipelinePlan
from tfopt.pipelines.profiling.limits import Limits, find_limits
from tfopt.pipelines.profiling.measuring import Run, run_passes, run_unfused
from tfopt.pipelines.profiling.naming import StageNames
from tfopt.pipelines.profiling.nodes import Node
from tfopt.pipelines.profiling.report import PipelineProfile, StageProfile
from tfopt.pipelines.sampling import trace
from tfopt.pipelines.shared.options import PerBatch

_SPLITTING_SHARE = 0.3  # of the time, where stages are fused
# A first pass through a cache and a full-size shuffle would only fill them in the time.
_SHUFFLE_BATCHES = 4
_APART = 32  # examples in a batch of the run that keeps stages apart


def profile_pipeline(plan_or_dataset: Any, seconds: float = 5) -> PipelineProfile:
    """Runs an input pipeline alone, without a model, and tells what each of its stages costs and which one limits it.

    Use it when `ThroughputLogger` shows a high `input_wait_percent`. A plan is built anew, so that the pipeline that is
    trained on keeps its state; its shuffle draws from a small buffer, which costs the same an element. Data that ends
    is gone over again, and then the later passes are measured, which read from the cache.

    The costs are those that TensorFlow itself counts for its autotuning: wall time of a stage's work, without waiting
    for other stages.

    A cache on disk is read where it is whole. Where it is not, nothing is written: the plan runs without its cache, as
    its stages work in the first epoch, and that counts as the first pass.

    Args:
        plan_or_dataset: A `PipelinePlan`, or any `tf.data.Dataset` of batches; the first dimension of an element's
            first tensor counts as its examples. Of a dataset whole iterations are used up: one that remembers its
            place, as a generator may, goes on from there afterwards. A `shuffle` in it first fills its buffer, so give
            it without where that takes longer than `seconds`.
        seconds: About how long to run it; up to three times as long where fewer than four batches come. A batch that
            was begun is waited for.

    Returns:
        The profile; `print` it.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `seconds` is not above zero.
        PipelineError: There is no batch or no example, or the pipeline fails.
        UnsupportedError: The plan makes its batches on the device, or is that of one of several processes on a tf.data
            service.

    Example:
        >>> import numpy as np
        >>> from tfopt.pipelines import plan_pipeline
        >>> profile = profile_pipeline(plan_pipeline(np.zeros((1000, 8)), batch_size=100), seconds=0.2)
        >>> profile.examples_per_second > 0
        True
    """
    seconds = _as_seconds(seconds)
    if isinstance(plan_or_dataset, PipelinePlan):
        return _profile_plan(plan_or_dataset, seconds)
    if isinstance(plan_or_dataset, tf.data.Dataset):
        return _profile_dataset(plan_or_dataset, seconds)
    raise TypeError(
        "Expected a PipelinePlan or a tf.data.Dataset of batches. "
        f"Received: {type(plan_or_dataset).__name__}. Make a plan with plan_pipeline(...)."
    )


def _profile_plan(plan: PipelinePlan, seconds: float) -> PipelineProfile:
    sources: list[Any] = []
    if plan.layout.cache.on == "device":
        raise UnsupportedError(
            "profile_pipeline expects stages that run on the host. Found cache='device': batches are made on the "
            "device, where TensorFlow counts no stages. Profile the same plan with cache=None for what loading takes."
        )
    if plan.layout.part is not None:
        raise UnsupportedError(
            "profile_pipeline expects a plan of one process. Found one of several on a tf.data service, whose batches "
            "the strategy takes. Profile the same plan in one process, without the strategy."
        )
    plan, unwritten = _without_writing(plan)
    dataset = _to_run(plan, sources).build()
    run = run_passes(dataset, (1 - _SPLITTING_SHARE) * seconds)
    names = StageNames(run.nodes, dataset, sources=sources)
    unfused: dict[str, float] = {}
    if names.any_fused:
        apart, sources = _stages_apart(plan)
        split = run_unfused(apart, _SPLITTING_SHARE * seconds)
        unfused = _costs(split, StageNames(split.nodes, apart, sources=sources), apart)
    if unwritten:
        run = replace(run, later=False)  # later passes would read the cache
    return _profile(plan.source.name, run, names, _limits(run, names, dataset, unfused))


def _profile_dataset(dataset: Any, seconds: float) -> PipelineProfile:
    run = run_passes(dataset, (1 - _SPLITTING_SHARE) * seconds)
    names = StageNames(run.nodes, dataset)
    unfused: dict[str, float] = {}
    if names.any_fused:
        split = run_unfused(dataset.repeat() if run.later else dataset, _SPLITTING_SHARE * seconds)
        unfused = _costs(split, StageNames(split.nodes, dataset), dataset)
    return _profile("dataset", run, names, _limits(run, names, dataset, unfused))


def _without_writing(plan: PipelinePlan) -> tuple[PipelinePlan, bool]:
    """Returns the plan, without its cache where that would be written to the disk, and whether that is so."""
    folder, key = plan.layout.cache.folder, plan.layout.key
    if folder is None or key is None or read_index(folder / key) is not None:
        return plan, False
    return replace(plan, layout=replace(plan.layout, cache=replace(plan.layout.cache, on=None), key=None)), True


def _to_run(plan: PipelinePlan, sources: list[Any]) -> PipelinePlan:
    """Returns a plan as it is run here; it puts what the source makes into `sources`."""

    def kept(made: Any) -> Any:
        sources.append(made)
        return made

    source, layout = plan.source, plan.layout
    shuffled = source.shuffled
    return replace(
        plan,
        source=replace(
            source,
            dataset=lambda: kept(source.dataset()),
            shuffled=None if shuffled is None else lambda seed: kept(shuffled(seed)),
        ),
        # A copy to the GPU leaves no figures on the host.
        layout=replace(
            layout,
            shuffle_buffer=min(layout.shuffle_buffer, _SHUFFLE_BATCHES * plan.options.batch_size),
            mixing_buffer=min(layout.mixing_buffer, _SHUFFLE_BATCHES * plan.options.batch_size),
            device=None,
        ),
    )


def _stages_apart(plan: PipelinePlan) -> tuple[Any, list[Any]]:
    """Returns endless batches of a plan's sampled elements, each stage in a map of its own, and their source."""
    traced = trace(plan.source, plan.source.dataset(), plan.options)
    examples = traced.augmented.repeat()
    batched = any(isinstance(function, PerBatch) for function in plan.options.augmentations)
    # Small batches: the time for this run is short.
    return (examples if batched else examples.batch(min(plan.options.batch_size, _APART))), [traced.raw]


def _costs(run: Run, names: StageNames, dataset: Any) -> dict[str, float]:
    """Returns the seconds of work an example, by stage; none where nothing came out."""
    return dict(_limits(run, names, dataset, {}).pool.seconds) if run.examples else {}


def _limits(run: Run, names: StageNames, dataset: Any, unfused: dict[str, float]) -> Limits:
    def stages_of(node: Node) -> dict[str, float]:
        stages = names.of(node)
        costs = [unfused.get(stage, 0.0) for stage in stages]
        if not sum(costs):
            # The function's work, not the copying into the batch, is what was fused.
            return {stage: float(index == 0) for index, stage in enumerate(stages)}
        return {stage: cost / sum(costs) for stage, cost in zip(stages, costs, strict=True)}

    threads = dataset.options().threading.private_threadpool_size or len(host().affinity)
    return find_limits(run.nodes, stages_of, batch_size=run.batch_size, threads=threads)


def _profile(name: str, run: Run, names: StageNames, limits: Limits) -> PipelineProfile:
    parallelism = dict.fromkeys(names.stages, 1.0)
    for node in run.nodes.walk():
        for stage in names.of(node):
            parallelism[stage] = max(parallelism[stage], node.parallelism or 1.0)
    speed = run.examples_per_second
    limits.account_for(run.cpu_seconds / run.examples, speed)
    bound = limits.rate()
    stages = tuple(
        StageProfile(
            name=stage,
            ms_per_example=1000 * limits.pool.seconds[stage],
            parallelism=int(parallelism[stage]),
            busy_percent=limits.busy_percent(stage, speed),
            speedup_without=limits.rate(stage) / bound,
        )
        for stage in names.stages
    )
    return PipelineProfile(
        name=name,
        seconds=run.seconds,
        batches=run.batches,
        examples=run.examples,
        examples_per_second=speed,
        cores=host().cpus,
        first_pass=not run.later,
        stages=stages,
    )


def _as_seconds(seconds: Any) -> float:
    if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool):
        raise TypeError(f"Expected a number for `seconds`. Received: {seconds!r}. Pass such as 5.")
    value = float(seconds)
    if not 0 < value < float("inf"):
        raise ValueError(f"Expected `seconds` above zero. Received: {seconds!r}. Pass such as 5.")
    return value
