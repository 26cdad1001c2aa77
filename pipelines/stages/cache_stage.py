"""Caches examples in memory, on disk or on the device."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfopt.pipelines.cache.cached_dataset import cached
from tfopt.pipelines.cache.choice import CacheChoice, choose_cache
from tfopt.pipelines.cache.key import cache_key, expect_one_order
from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.device.device_stage import refusing
from tfopt.pipelines.device.placing import OnDevice
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.stages.stage import Flow, ShapeCheck, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache(Stage):
    """Caches the examples; without a cache, it says why there is none."""

    choice: CacheChoice
    key: str | None  # of a cache on disk, when it was planned
    options: PipelineOptions
    facts: Facts
    check: ShapeCheck | None = None  # of the examples, if no function runs before or after the cache

    def apply(self, flow: Flow) -> None:
        """Reads the examples from the cache, or writes them to it on the way."""
        if self.check is not None:
            flow.check = self.check
        if self.choice.on == "device":
            flow.dataset = refusing(flow.flush())
        elif self.choice.on == "memory":
            flow.dataset = flow.flush().cache()
        elif self.choice.folder is not None:
            prepare = flow.take_map(deterministic=True)
            store = self._store(self.choice.folder, flow.description)
            flow.dataset = cached(store, prepare(flow.dataset).element_spec, flow.dataset, prepare)

    def summary(self) -> dict[str, Any]:
        """Returns where the cache is, and its key."""
        choice = self.choice
        return {"cache": choice.on, "cache_after": choice.after if choice.on else None, "cache_key": self.key}

    def without(self) -> "Cache":
        """Returns the stage without a cache."""
        return replace(self, choice=replace(self.choice, on=None), key=None)

    def _store(self, folder: Path, description: str) -> Store:
        options, facts, choice = self.options, self.facts, self.choice
        return Store(
            folder,
            # Not the planned key: the functions are traced now, and what they read may have changed since.
            cache_key(options, facts, choice),
            count=facts.used,
            expected_bytes=None if choice.bytes is None else int(choice.bytes),
            limit_bytes=None if options.cache_limit_gib is None else int(options.cache_limit_gib * 2**30),
            what=description,
        )


def plan_cache(options: PipelineOptions, facts: Facts, on_device: OnDevice | None) -> Cache:
    """Returns the stage "cache".

    With cache="auto", what cannot be fingerprinted is not cached, and the reason says so.

    Args:
        options: The pipeline's options.
        facts: What is known about the data.
        on_device: Where cache="device" keeps the examples; None without it.

    Raises:
        ValueError: If a cache was asked for whose content has no end, no fixed order or no fingerprint, or would
            freeze a random crop.
    """
    key = None
    if on_device is not None:
        choice = CacheChoice("device", "transform", on_device.reason, on_device.bytes)
    else:
        choice = choose_cache(options, facts)
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
