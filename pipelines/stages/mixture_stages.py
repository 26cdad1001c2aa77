"""The stages of a mixture: one for each part, and the one in which their examples take turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.choice import CacheChoice
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.epochs import Epoch, Readings
from tfopt.pipelines.shared.mixture_turns import Schedule
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import in_turns
from tfopt.pipelines.stages.example_stages import Cache
from tfopt.pipelines.stages.stage import Flow, Stage, split_at_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPart(Stage):
    """A part of a mixture, with its stages up to the batch."""

    stages: tuple[Stage, ...]
    options: PipelineOptions
    facts: Facts
    share: float
    taken: int | None  # its examples in an epoch of the mixture; None if unknown or endless
    held_mib: float | None  # what its cache and shuffle hold in memory; None if unknown

    element_spec: Any  # of its examples

    def apply(self, flow: Flow) -> None:
        """Applies the stages up to the cache, which all iterations share."""
        flow.parts.append(self.cached(flow))

    def cached(self, whole: Flow) -> Flow:
        """Returns a flow after the stages up to the cache, of the next part of a mixture."""
        flow = Flow(whole.description, whole.place, number=len(whole.parts), outside=whole.outside)
        for stage in split_at_cache(self.stages)[0]:
            stage.apply(flow)
        flow.flush()
        return flow

    def examples(self, cached: Flow, epoch: Epoch, examples: Any = 0) -> Any:
        """Returns the part's dataset in an epoch of the mixture, without its first so many examples."""
        after = split_at_cache(self.stages)[1]
        # No chunk is cut, since kernels may round otherwise in another.
        cut = examples % max(stage.at_once for stage in after)
        readings = Readings(examples - cut, self.times, self.facts.count or 0)
        flow = cached.of_part(epoch.of_part(cached.number or 0, self.options.seed, readings))
        for stage in after:
            stage.apply(flow)
        return Readings.without(cut, flow.flush())

    @property
    def cache(self) -> CacheChoice:
        """Where its examples are cached."""
        return next(stage.choice for stage in self.stages if isinstance(stage, Cache))

    @property
    def times(self) -> int:
        """How often an epoch begins to read its examples."""
        count = self.facts.count
        return 1 if not count or self.taken is None else max(1, -(-self.taken // count))

    @property
    def caches(self) -> bool:
        """Always: the mixture joins what comes after the parts' own caches."""
        return True

    def within(self) -> tuple[Stage, ...]:
        """Returns its stages."""
        return self.stages

    def to_dict(self) -> dict[str, Any]:
        """Returns the part as JSON values, with its own stages."""
        summary: dict[str, Any] = {"share": self.share, "examples_per_epoch": self.taken}
        for stage in self.stages:
            summary |= stage.summary()
        stages = [stage.to_dict() for stage in self.stages]
        own = {"name": self.name, "setting": self.setting, "reason": self.reason}
        return {**own, **summary, "options": self.options.to_dict(), "stages": stages}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(Stage):
    """Has the parts take turns."""

    parts: tuple[MixedPart, ...]
    schedule: Schedule
    options: PipelineOptions  # the mixture's, which shuffles nothing
    facts: Facts

    def apply(self, flow: Flow) -> None:
        """Takes examples of the parts in turn."""
        flow.dataset = flow.begin(partial(self._mixed, flow.parts))

    def _mixed(self, flows: Sequence[Flow], epoch: Epoch) -> Any:
        """Returns the examples of an epoch."""
        skipped, end = epoch.readings.skipped, self.facts.count
        # Where the end is not known, only reading finds out whether it comes before the position.
        known = end is not None or self.facts.infinite
        first = skipped if known else 0
        datasets = [
            part.examples(flow, epoch, examples)
            for part, flow, examples in zip(self.parts, flows, self.schedule.counts(first), strict=True)
        ]
        mixed = in_turns(self.schedule.dataset(first, end), datasets)
        if end is not None:
            mixed = mixed.apply(tf.data.experimental.assert_cardinality(epoch.readings.left(end)))
        return mixed if known else mixed.skip(skipped)

    def summary(self) -> dict[str, Any]:
        """Returns the mixture's number of examples, and its parts."""
        parts = [part.to_dict() for part in self.parts]
        return {"source": self.facts.source.name, "count": self.facts.count, "parts": parts}
