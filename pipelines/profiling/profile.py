"""`profile_pipeline`: what each stage of an input pipeline costs, and which one limits it."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from tfopt import checks
from tfopt.errors import UnsupportedError
from tfopt.hardware import host
from tfopt.pipelines.cache.folder import read_index
from tfopt.pipelines.inspection.sample import open_source
from tfopt.pipelines.inspection.tracing import trace
from tfopt.pipelines.plan import PipelinePlan, plan_of
from tfopt.pipelines.profiling.pipeline_profile import PipelineProfile, StageProfile
from tfopt.pipelines.profiling.sampled_run import Node, Run, endless, run_passes, run_unfused
from tfopt.pipelines.profiling.stage_names import READ, StageNames
from tfopt.pipelines.shared.nondeterminism import lineage, runs_python
from tfopt.pipelines.stages.device_stages import CopyToDevice
from tfopt.pipelines.stages.example_stages import Cache, FunctionStage
from tfopt.pipelines.stages.mixture_stages import MixedPart, Mixture
from tfopt.pipelines.stages.order_stages import Mix, Read, Shuffle
from tfopt.pipelines.stages.stage import all_of

_SPLITTING_SHARE = 0.3  # of the time, if stages are fused
# A first pass through a cache and a full-size shuffle would only fill them in the time.
_SHUFFLE_BATCHES = 4
_UNFUSED_BATCH = 32  # examples; small, since the time for that run is short
_MOSTLY_SEEN = 0.5
_MOSTLY_CALLS_MS = 0.05  # an example, below which TensorFlow's call of the function takes most of the time
_HAND_OVER = ""  # stands for what is not a stage's work


def profile_pipeline(plan_or_dataset: Any, seconds: float = 5) -> PipelineProfile:
    """Runs an input pipeline alone, without a model; reports what each stage costs and which one limits it.

    Use it when `ThroughputLogger` shows a high `input_wait_percent`. A plan, or that of a dataset from
    `build_pipeline`, is built again from its start, so that the pipeline in training keeps its place. Its shuffle draws
    from a small buffer, which costs the same per element. A complete cache on disk is read, and otherwise nothing is
    written. docs/profiling.md says which pass over the data is measured.

    Args:
        plan_or_dataset: A `PipelinePlan`, or any `tf.data.Dataset` of batches; the first dimension of an element's
            first tensor counts as its examples. A dataset is iterated from its start; one that remembers its place, as
            a generator may, goes on from there afterwards. A `shuffle` in it fills its buffer first; leave it out if
            that takes longer than `seconds`.
        seconds: About how long to run; up to three times as long if fewer than four batches come. Waits for a batch
            that has begun.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `seconds` is not above zero.
        PipelineError: If there is no batch or no example, or the pipeline fails.
        UnsupportedError: If the plan makes its batches on the device, or belongs to one of several processes on a
            tf.data service.

    Example:
        >>> import numpy as np
        >>> from tfopt.pipelines import plan_pipeline
        >>> profile = profile_pipeline(plan_pipeline(np.zeros((1000, 8)), batch_size=100), seconds=0.2)
        >>> profile.examples_per_second > 0
        True
    """
    seconds = checks.number("seconds", seconds, "Pass a duration, such as 5.", above=0)
    plan = plan_or_dataset if isinstance(plan_or_dataset, PipelinePlan) else plan_of(plan_or_dataset)
    if plan is not None:
        return _profile_plan(plan, seconds)
    if isinstance(plan_or_dataset, tf.data.Dataset):
        return _profile_dataset(plan_or_dataset, seconds)
    raise TypeError(
        "Expected a PipelinePlan or a tf.data.Dataset of batches. "
        f"Received: {type(plan_or_dataset).__name__}. Make a plan with plan_pipeline(...)."
    )


@dataclass(slots=True)
class Resource:
    """Something on which the work of stages takes turns."""

    capacity: float  # seconds of work per second
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # work per example, by stage

    def rate(self, without: str | None = None) -> float:
        """Returns the examples per second that it admits; `without` leaves out a stage's work."""
        work = sum(seconds for stage, seconds in self.seconds.items() if stage != without)
        return self.capacity / work if work > 0 else math.inf


@dataclass(slots=True)
class Limits:
    """What holds a pipeline back: the resources that its stages share."""

    pool: Resource  # tf.data's thread pool
    others: list[Resource] = field(default_factory=list)  # threads, and calls of parallel nodes
    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # parallel calls per example, by stage
    batch_size: float = 1.0

    def rate(self, without: str | None = None) -> float:
        """Returns the examples per second that all of them admit; `without` leaves out a stage's work."""
        return min(resource.rate(without) for resource in (self.pool, *self.others))

    def busy_percent(self, stage: str, examples_per_second: float) -> float:
        """Returns how much of its own thread or parallel calls a stage takes up at this speed; at most 100."""
        shares = [own.seconds[stage] / own.capacity for own in self.others if stage in own.seconds]
        return min(100.0, 100 * examples_per_second * max(shares, default=0.0))

    def account_for(self, cpu_seconds: float, examples_per_second: float) -> None:
        """Adds processor time that was not seen, if the work seen explains less than half of the time.

        TensorFlow does not time starting a call and waking its thread. With small elements that is most of the work; it
        grows with the number of calls, and handing a batch over counts as one. `cpu_seconds` are per example.
        """
        unseen = cpu_seconds - sum(self.pool.seconds.values())
        if unseen <= 0 or self.rate() * _MOSTLY_SEEN < examples_per_second:
            return
        hand_over = 1 / self.batch_size
        total = sum(self.calls.values()) + hand_over
        for stage, calls in self.calls.items():
            self.pool.seconds[stage] += unseen * calls / total
        self.pool.seconds[_HAND_OVER] += unseen * hand_over / total


def find_limits(
    root: Node, stages_of: Callable[[Node], dict[str, float]], *, batch_size: float, threads: float
) -> Limits:
    """Finds what the pipeline's stages share.

    - The calls of a parallel node: as many at once as its parallelism.
    - A thread: nodes that are not parallel take turns in the thread of the parallel node or prefetch they feed.
    - tf.data's thread pool, one thread per core, which runs the functions of all stages. A function that sleeps holds
      its thread like one that computes, so stages hold each other back even while the processor is idle.

    `stages_of` returns the stages whose work a node does, each with its share; an element of `root` is a batch.
    """
    limits = Limits(Resource(threads), batch_size=batch_size)

    def resource(capacity: float) -> Resource:
        limits.others.append(Resource(capacity))
        return limits.others[-1]

    # From a node to its inputs, with the thread that asks it for elements, how many it gives per element of the root,
    # and how many like it run side by side.
    def visit(node: Node, thread: Resource, given: float, copies: float) -> None:
        own = thread if node.parallelism is None else resource(node.parallelism * copies)
        for stage, share in stages_of(node).items():
            seconds = share * given * node.seconds / max(node.elements, 1) / batch_size
            own.seconds[stage] += seconds
            limits.pool.seconds[stage] += seconds
            limits.calls[stage] += share * given / batch_size if node.parallelism else 0.0
        starts_thread = node.parallelism is not None or node.name == "Prefetch"
        upstream = resource(copies) if starts_thread else thread
        for (slot, _), inner in node.inputs.items():
            if node.nests and slot > 0:
                visit(inner, own, given, own.capacity if node.parallelism else copies)
            else:
                visit(inner, upstream, given * _inputs_per_element(node, inner), copies)

    visit(root, resource(1.0), 1.0, 1.0)
    return limits


def _inputs_per_element(node: Node, inner: Node) -> float:
    if node.ratio is not None:
        return node.ratio
    return inner.elements / node.elements if node.elements else 1.0


def _profile_plan(plan: PipelinePlan, seconds: float) -> PipelineProfile:
    if plan.options.on_device:
        raise UnsupportedError(
            "profile_pipeline expects stages that run on the host. Found cache='device': batches are made on the "
            "device, where TensorFlow counts no stages. Profile the same plan with cache=None to see what loading "
            "takes."
        )
    if any(getattr(stage, "part", None) is not None for stage in plan.stages):
        raise UnsupportedError(
            "profile_pipeline expects a plan of one process. Found one of several, whose batches the strategy takes. "
            "Profile the same plan in one process, without the strategy."
        )

    sources: list[Any] = []
    dataset = _to_run(plan, sources).first_epoch()
    if any(isinstance(stage, Mixture) for stage in plan.stages):
        profile = replace(_profile_dataset(dataset, seconds), name=plan.source.name)
    else:

        def unfused(run: Run) -> dict[str, float]:
            del run
            apart, raw = _stages_apart(plan)
            return _unfused_costs(apart, apart, [raw], seconds)

        profile, _ = _profile(plan.source.name, dataset, sources, seconds, unfused)
        profile = replace(profile, remedy=_python(_working(plan, sources, profile.limiting)) or remedy(plan, profile))
    # Later passes would read a cache on disk, which is not written here.
    return replace(profile, first_pass=True) if any(map(_would_write, all_of(plan.stages))) else profile


def remedy(plan: PipelinePlan, profile: PipelineProfile) -> str:
    """Returns the advice to take batches, for a limiting function of the user's that does little for each example."""
    name = profile.limiting
    functions = [stage.function for stage in plan.stages if isinstance(stage, FunctionStage) and stage.name == name]
    cost = sum(stage.ms_per_example for stage in profile.stages if stage.name == name)
    each = any(not function.by_batch for function in functions)
    if name not in ("transform", "augment") or not each or cost >= _MOSTLY_CALLS_MS:
        return ""
    return (
        f"{name} is called for each example, and the call takes most of that: let the function take a batch, and pass "
        f"{name}=per_batch(function)."
    )


def _profile_dataset(dataset: Any, seconds: float) -> PipelineProfile:
    def unfused(run: Run) -> dict[str, float]:
        return _unfused_costs(endless(dataset) if run.later else dataset, dataset, None, seconds)

    profile, names = _profile("dataset", dataset, None, seconds, unfused)
    limiting = [one for one in lineage(dataset) if profile.limiting and names.of_dataset(one) == profile.limiting]
    return replace(profile, remedy=_python(limiting))


def _working(plan: PipelinePlan, sources: Sequence[Any], stage: str | None) -> list[Any]:
    """Returns the datasets whose functions do the work of a plan's stage, apart from other stages."""
    if stage == READ:
        return [one for source in sources for one in lineage(source)]
    if stage not in ("decode", "transform", "augment"):
        return []
    return [one for one in lineage(_stages_apart(plan)[0]) if getattr(one, "_name", None) == stage]


def _python(datasets: Sequence[Any]) -> str:
    """Returns the advice to do without Python, if a function of these datasets calls it."""
    if not any(map(runs_python, datasets)):
        return ""
    return "It calls a Python function, and Python runs one call at a time: rewrite it with TensorFlow operations."


def _to_run(plan: PipelinePlan, sources: list[Any]) -> PipelinePlan:
    """Returns a plan as it is run here; the datasets that its source makes are added to `sources`."""

    def recorded(make: Callable[..., Any] | None) -> Any:
        def made(*given: Any) -> Any:
            sources.append(make(*given))  # type: ignore[misc]
            return sources[-1]

        return make and made

    def adapted(stage: Any) -> Any:
        if isinstance(stage, Read):
            source = stage.source
            pools = source.pools and replace(source.pools, read=recorded(source.pools.read))
            made = {name: recorded(getattr(source, name)) for name in ("dataset", "shuffled", "at")}
            return replace(stage, source=replace(source, pools=pools, **made))
        if isinstance(stage, Mix | Shuffle):
            small = replace(stage, buffer=min(stage.buffer, _SHUFFLE_BATCHES * plan.options.batch_size))
            return replace(small, rests=False) if isinstance(small, Shuffle) else small
        if isinstance(stage, CopyToDevice):
            return replace(stage, device=None)  # a copy to the GPU leaves no figures on the host
        if isinstance(stage, MixedPart):
            return replace(stage, stages=tuple(map(adapted, stage.stages)))
        if isinstance(stage, Mixture):
            return replace(stage, parts=tuple(map(adapted, stage.parts)))
        return stage.without() if _would_write(stage) else stage

    return replace(plan, stages=tuple(map(adapted, plan.stages)))


def _would_write(stage: Any) -> bool:
    """Whether this is a cache on disk that is not there yet."""
    if not isinstance(stage, Cache) or stage.choice.folder is None or stage.key is None:
        return False
    return read_index(stage.choice.folder / stage.key) is None


def _stages_apart(plan: PipelinePlan) -> tuple[Any, Any]:
    """Returns endless batches of a plan's sampled elements, each stage in a map of its own, and their source."""
    _, raw, _, _ = open_source(plan.source)
    traced = trace(plan.source, plan.options, raw)
    examples = traced.augmented.repeat()
    batched = any(function.by_batch for function in plan.options.augmentations)
    return (examples if batched else examples.batch(min(plan.options.batch_size, _UNFUSED_BATCH))), raw


def _unfused_costs(to_run: Any, dataset: Any, sources: Sequence[Any] | None, seconds: float) -> dict[str, float]:
    """Returns the seconds of work per example by stage, each in a node of its own; nothing if no example came out."""
    run = run_unfused(to_run, _SPLITTING_SHARE * seconds)
    names = StageNames(run.nodes, dataset, sources=sources)
    return dict(_limits(run, names, dataset, {}).pool.seconds) if run.examples else {}


def _limits(run: Run, names: StageNames, dataset: Any, unfused: dict[str, float]) -> Limits:
    def stages_of(node: Node) -> dict[str, float]:
        stages = names.of(node)
        costs = [unfused.get(stage, 0.0) for stage in stages]
        if not sum(costs):
            # The function's work was fused, not the copying into the batch.
            return {stage: float(index == 0) for index, stage in enumerate(stages)}
        return {stage: cost / sum(costs) for stage, cost in zip(stages, costs, strict=True)}

    threads = dataset.options().threading.private_threadpool_size or len(host().affinity)
    return find_limits(run.nodes, stages_of, batch_size=run.batch_size, threads=threads)


def _profile(
    name: str,
    dataset: Any,
    sources: Sequence[Any] | None,
    seconds: float,
    unfused: Callable[[Run], dict[str, float]],
) -> tuple[PipelineProfile, StageNames]:
    run = run_passes(dataset, (1 - _SPLITTING_SHARE) * seconds)
    names = StageNames(run.nodes, dataset, sources=sources)
    limits = _limits(run, names, dataset, unfused(run) if names.any_fused else {})
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
    profile = PipelineProfile(
        name=name,
        seconds=run.seconds,
        batches=run.batches,
        examples=run.examples,
        examples_per_second=speed,
        cores=host().cpus,
        first_pass=not run.later,
        stages=stages,
    )
    return profile, names
