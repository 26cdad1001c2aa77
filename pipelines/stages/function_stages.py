"""Calls functions on examples and batches: decode, crop, transform and augment."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.choice import CacheChoice
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.crop import crop_example
from tfopt.pipelines.shared.functions import StageFunction, augment_functions
from tfopt.pipelines.shared.options import PipelineOptions, function_name
from tfopt.pipelines.shared.seeding import part_seed
from tfopt.pipelines.stages.read_shuffle import Shuffle
from tfopt.pipelines.stages.stage import Flow, MapGroup, ShapeCheck, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStage(Stage):
    """Calls a function on each example, or on each batch; neighbours of one group share a map."""

    function: StageFunction
    group: MapGroup
    check: ShapeCheck | None = None  # of what it returns

    def apply(self, flow: Flow) -> None:
        """Adds the function to the map of its group."""
        flow.call(self.function, self.group)
        if self.check is not None:
            flow.check = self.check


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(Stage):
    """Decodes whole batches of indices at once."""

    decode: Any

    def apply(self, flow: Flow) -> None:
        """Maps `decode` over the batches."""
        flow.dataset = flow.flush().map(self.decode, num_parallel_calls=tf.data.AUTOTUNE, name="gather")


def plan_functions(
    options: PipelineOptions, facts: Facts, cache: CacheChoice
) -> tuple[list[FunctionStage], list[FunctionStage]]:
    """Returns the stages up to the cache, and those after it; all of them after it if there is none."""
    source, crop = facts.source, options.crop
    cached = cache.on is not None
    group = MapGroup(part_seed(options.seed, "crop"), served=options.service is not None)
    # A crop after the cache cuts from whole decoded images.
    fused = crop is not None and source.encoded is not None and not (crop.random and cached)
    stages = []
    decode = source.encoded if fused else source.decode
    if decode is not None:
        function = StageFunction("decode", decode)
        stages.append(_stage(function, "parallel", "as many calls at once as pay", group))
    at = len(stages)
    if crop is not None:
        function = StageFunction("crop", partial(crop_example, crop=crop, only_jpeg=source.only_jpeg), crop.random)
        height, width = getattr(crop, "size", (0, 0))
        setting = f"{'random' if crop.random else 'central'}, {height}×{width}"
        reason = "drawn again in each epoch" if crop.random else "the same in every epoch"
        stages.append(
            _stage(function, setting, reason + ("; of a JPEG only the crop is decoded" if fused else ""), group)
        )
        at += not crop.random
    if options.transform is not None:
        function = StageFunction("transform", options.transform)
        stages.append(_stage(function, function_name(options.transform), "deterministic, parallel", group))
    if not cached:
        at = 0
    elif cache.after == "transform":
        at = len(stages)
    return stages[:at], stages[at:]


def plan_augment(options: PipelineOptions, *, by_batch: bool) -> list[FunctionStage]:
    """Returns the stages "augment" of functions that take single examples, or of those that take batches."""
    served = options.service is not None and not by_batch
    group = MapGroup(part_seed(options.seed, "batch" if by_batch else "augment"), augments=True, served=served)
    when = "" if options.training else "; runs with training=False too"
    return [
        _stage(
            function,
            function_name(function.call),
            f"runs again in each epoch, parallel{'; a fresh seed each time' if function.seeded else ''}{when}",
            group,
        )
        for function in augment_functions(options, by_batch=by_batch)
    ]


def reads_rows(options: PipelineOptions, facts: Facts, cache: CacheChoice, shuffle: Shuffle) -> bool:
    """Whether batches are made of rows in memory by index alone, so that whole batches may be gathered at once."""
    source = facts.source
    plain = source.resident and source.decode is not None and options.transform is None and options.crop is None
    return plain and cache.on is None and (shuffle.first or not options.shuffle)


def plan_gather(facts: Facts) -> Stage:
    """Returns the stage "gather", in place of "decode"."""
    reason = "rows in memory need no work one by one"
    return Gather(name="gather", setting="whole batches", reason=reason, decode=facts.source.decode)


def gather_on_device() -> Stage:
    """Returns the stage "gather" for batches that are made on the device."""
    reason = "by index, in a function of its own that XLA compiles"
    return Stage(name="gather", setting="on the device", reason=reason)


def on_device(stage: FunctionStage, obstacle: str | None) -> FunctionStage:
    """Returns the stage of a function that the device calls on whole batches.

    Args:
        stage: The stage "augment".
        obstacle: Why it runs without XLA; None if XLA compiles it.
    """
    how = "compiled by XLA" if obstacle is None else f"without XLA: {obstacle}"
    seeds = "; a fresh seed for each batch" if stage.function.seeded else ""
    return replace(stage, reason=f"whole batches on the device, {how}{seeds}")


def _stage(function: StageFunction, setting: str, reason: str, group: MapGroup) -> FunctionStage:
    return FunctionStage(name=function.stage, setting=setting, reason=reason, function=function, group=group)
