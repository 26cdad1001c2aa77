"""The stages of single examples: decode, crop, transform, cache and augment."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.cached_dataset import Cached
from tfopt.pipelines.cache.choice import CacheChoice
from tfopt.pipelines.cache.key import cache_key, expect_one_order
from tfopt.pipelines.cache.rows import Rows
from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.device.device_stage import refusing
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.inspection.sample import ShapeCheck
from tfopt.pipelines.shared.crop_elements import crop_example
from tfopt.pipelines.shared.options import PipelineOptions, StageFunction
from tfopt.pipelines.stages.stage import Flow, Stage

_CHUNK_BYTES = 2**20  # of examples that are decoded at once
_AT_ONCE_SECONDS = 0.1  # to compute the examples of a cache on disk that are written together


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStage(Stage):
    """Calls a function on each example, or on each batch; neighbours that draw by one key share a map."""

    function: StageFunction
    draws: str  # by the key of "crop" or "augment", or of "batch" for functions of whole batches
    check: ShapeCheck | None = None  # of what it returns

    def apply(self, flow: Flow) -> None:
        """Adds the function to the map of its group."""
        flow.call(self.function, self.draws)
        if self.check is not None:
            flow.check = self.check


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyAtOnce(Stage):
    """Calls a function with many examples at once, and makes single ones of them again; neighbours share a map."""

    function: StageFunction
    single: Any  # the same for one example
    size: int
    check: ShapeCheck | None = None  # of the examples that it returns

    def apply(self, flow: Flow) -> None:
        """Adds the function to the map."""
        flow.call_with_many(self.function, self.size)
        if self.check is not None:
            flow.check = self.check

    @property
    def at_once(self) -> int:
        """As its `size` says."""
        return self.size

    def with_batches(self) -> FunctionStage:
        """Returns the stage that calls the function with the batches themselves."""
        return _stage(self.function, "whole batches", self.reason, "batch")

    def one_by_one(self) -> FunctionStage:
        """Returns the stage that calls the function with one example at a time."""
        stage = _stage(StageFunction(self.name, self.single), "parallel", self.reason, "crop")
        return replace(stage, check=self.check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache(Stage):
    """Caches the examples; without a cache, it says why there is none."""

    choice: CacheChoice
    key: str | None  # of a cache on disk, when it was planned
    options: PipelineOptions
    facts: Facts

    def apply(self, flow: Flow) -> None:
        """Keeps the examples; the shuffle reads those of a cache on disk, in its order."""
        options, facts, choice = self.options, self.facts, self.choice
        if facts.raw_examples:  # else the last function checks them
            flow.check = facts.check
        if choice.on == "device":
            flow.dataset = refusing(flow.flush())
        elif choice.on == "memory":
            flow.dataset = flow.flush().cache()
        elif choice.folder is not None:
            prepare = flow.take_maps(deterministic=True)
            store = Store(
                choice.folder,
                # Not the planned key: the functions are traced now, and what they read may have changed since.
                partial(cache_key, options, facts.traced_again(options), choice),
                count=facts.used,
                expected_bytes=None if choice.bytes is None else int(choice.bytes),
                limit_bytes=None if options.cache_limit_gib is None else int(options.cache_limit_gib * 2**30),
                what=flow.description,
            )
            saved = facts.sample.seconds(choice.after)
            # No batch waits for more examples than its own, or for more than a moment.
            at_once = max(options.batch_size, int(_AT_ONCE_SECONDS / max(saved, 1e-9)))
            rows = Rows(prepare(flow.dataset).element_spec)
            at = facts.source.at if facts.count is not None else None
            flow.cached = Cached(store, flow.dataset, at, prepare, rows, options.batch_size, at_once)

    def summary(self) -> dict[str, Any]:
        """Returns where the cache is, and its key."""
        choice = self.choice
        return {"cache": choice.on, "cache_after": choice.after if choice.on else None, "cache_key": self.key}

    @property
    def caches(self) -> bool:
        """Whether there is a cache."""
        return self.choice.on is not None

    @property
    def repeats_first_epoch(self) -> bool:
        """Whether a first epoch in the cache's own order would repeat that of the run that wrote it."""
        written = self.choice.folder is not None and self.key is not None and (self.choice.folder / self.key).is_dir()
        return written and self.options.seed is None

    def without(self) -> "Cache":
        """Returns the stage without a cache."""
        return replace(self, choice=replace(self.choice, on=None), key=None)


def plan_functions(
    options: PipelineOptions, facts: Facts, cache: CacheChoice
) -> tuple[list[FunctionStage | ManyAtOnce], list[FunctionStage | ManyAtOnce]]:
    """Returns the stages up to the cache, and those after it; all of them after it if there is none."""
    source, crop = facts.source, options.crop
    cached = cache.on is not None
    # A crop after the cache cuts from whole decoded images.
    fused = crop is not None and source.encoded is not None and not (crop.random and cached)
    stages: list[FunctionStage | ManyAtOnce] = []
    decode = source.encoded if fused else source.decode
    if facts.by_batch and not fused and source.decode_batch is not None and decode is not None:
        function = StageFunction("decode", source.decode_batch, by_batch=True)
        stages.append(_many_at_once(function, decode, options, facts, "quicker than one by one"))
    elif decode is not None:
        function = StageFunction("decode", decode)
        stages.append(_stage(function, "parallel", "as many calls at once as pay", "crop"))
    at = len(stages)
    if crop is not None:
        call = partial(crop_example, crop=crop, crop_with=options.crops_with, only_jpeg=source.only_jpeg)
        function = StageFunction("crop", call, crop.random)
        height, width = getattr(crop, "size", (0, 0))
        setting = f"{'random' if crop.random else 'central'}, {height}×{width}"
        reason = "drawn again in each epoch" if crop.random else "the same in every epoch"
        moved = ", ".join(sorted(name for name, moves in options.crops_with.items() if moves))
        reason += f"; cropped with the image: {moved}" if moved else ""
        reason += "; of a JPEG only the crop is decoded" if fused else ""
        stages.append(_stage(function, setting, reason, "crop"))
        at += not crop.random
    transform = options.transformation
    if transform is not None and transform.by_batch:
        reason = f"{transform.name}, deterministic, parallel"
        stages.append(_many_at_once(transform, _alone(transform.call), options, facts, reason))
    elif transform is not None:
        stages.append(_stage(transform, transform.name, "deterministic, parallel", "crop"))
    if stages:
        stages[-1] = replace(stages[-1], check=facts.check)
    if not cached:
        at = 0
    elif cache.after == "transform":
        at = len(stages)
    return stages[:at], stages[at:]


def plan_cache(options: PipelineOptions, facts: Facts, choice: CacheChoice) -> Cache:
    """Returns the stage "cache".

    With cache="auto", what has no key is not cached, and the reason says so.

    Raises:
        ValueError: If a cache on disk was asked for whose content has no fixed order or no key.
    """
    key = None
    if choice.folder is not None:
        try:
            expect_one_order(facts)
            key = cache_key(options, facts, choice)
        except ValueError as error:
            if options.cache_folder is not None:
                raise
            choice = replace(choice, on=None, reason=f"{choice.reason}, but: {error}")
    setting, reason = choice.on or "none", choice.reason
    if key is not None:
        setting = f"{choice.folder}/{key[:14]}…"
        reason += "; written in the first whole epoch, then read, by later runs too"
    return Cache(name="cache", setting=setting, reason=reason, choice=choice, key=key, options=options, facts=facts)


def plan_augment(options: PipelineOptions, *, by_batch: bool) -> list[FunctionStage]:
    """Returns the stages "augment" of functions that take single examples, or of those that take batches."""
    when = "" if options.training else "; runs with training=False too"
    return [
        _stage(
            function,
            function.name,
            f"runs again in each epoch, parallel{'; a fresh seed each time' if function.seeded else ''}{when}",
            "batch" if by_batch else "augment",
        )
        for function in options.augmentations
        if function.by_batch is by_batch
    ]


def _alone(function: Any) -> Any:
    """Returns a function of one example that calls one of batches."""

    # Not marked do_not_convert: AutoGraph must reach the user's function.
    def alone(*parts: Any) -> Any:
        batch = function(*tf.nest.map_structure(lambda part: part[tf.newaxis], parts))
        return tf.nest.map_structure(lambda part: part[0], batch)

    return alone


def _many_at_once(
    function: StageFunction, single: Any, options: PipelineOptions, facts: Facts, reason: str
) -> ManyAtOnce:
    # A divisor of the batch, so that no position cuts one: kernels may round otherwise in another.
    batch = options.batch_size if facts.part is None else facts.part.size
    fitting = _CHUNK_BYTES / max(facts.sample.decoded_bytes, facts.sample.example_bytes, 1)
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    size = min(divisors, key=lambda size: max(size / fitting, fitting / size))
    return ManyAtOnce(
        name=function.stage,
        setting=f"{size:,} at once",
        reason=reason,
        function=function,
        single=single,
        size=size,
    )


def _stage(function: StageFunction, setting: str, reason: str, draws: str) -> FunctionStage:
    return FunctionStage(name=function.stage, setting=setting, reason=reason, function=function, draws=draws)
