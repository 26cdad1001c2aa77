"""The result of `profile_pipeline`, as a table, JSON and a chart."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tfopt.page import Bar, bar_chart
from tfopt.text import Shown, aligned

# A stage limits the pipeline if leaving it out gains more than a tenth, and clearly more than leaving out any other.
_WORTHWHILE = 1.1
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """The cost of one stage."""

    name: str
    ms_per_example: float
    """Its work per example: wall time, without waiting for other stages."""
    parallelism: int
    """How many of its calls may run at once."""
    busy_percent: float
    """How much of the time it takes up those calls, or its thread."""
    speedup_without: float
    """How many times as fast the pipeline would be without it; infinite if nothing else works."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PipelineProfile(Shown):
    """What `profile_pipeline` measured."""

    name: str
    """What was profiled."""
    seconds: float
    """How long it ran."""
    batches: int
    examples: int
    examples_per_second: float
    cores: float
    """Cores that the process may use."""
    first_pass: bool
    """Whether this is the first pass over the data, which fills a cache, rather than later ones."""
    stages: tuple[StageProfile, ...]
    """In the order in which elements pass them. Stages before a full cache do not work, and are left out."""
    remedy: str = ""
    """What would make the limiting stage quicker, where that shows; else empty."""

    @property
    def examples_per_second_per_core(self) -> float:
        """The speed per core that the process may use."""
        return self.examples_per_second / self.cores

    @property
    def limiting(self) -> str | None:
        """The stage that limits the pipeline; None if none stands out, and `verdict` says why."""
        leading = self._leading()
        return leading[0].name if len(leading) == 1 else None

    @property
    def verdict(self) -> str:
        """The limiting stage, in a sentence."""
        leading = self._leading()
        if not leading:
            return "No single stage limits it: without any one of them it would be about as slow."
        # "Without the cache" would read as if having none were faster.
        names = " and ".join("access to the cache" if stage.name == "cache" else stage.name for stage in leading)
        if len(leading) > 1:
            return f"{names} limit it alike: if one of them cost nothing, {self._without(leading[0])}."
        return f"{names} limits it: if it cost nothing, {self._without(leading[0])}."

    def examples_per_second_without(self, stage: StageProfile) -> float | None:
        """Returns the pipeline's speed without a stage; None if nothing else works."""
        speed = self.examples_per_second * stage.speedup_without
        return speed if math.isfinite(speed) else None

    def __str__(self) -> str:
        which = "first pass over the data" if self.first_pass else "later passes over the data"
        head = (
            f"Profile of {self.name}: {self.examples_per_second:,.0f} examples/s "
            f"({self.examples_per_second_per_core:,.0f} per core, {self.cores:g} cores), {which}"
        )
        rows = [("stage", "ms/example", "at once", "busy", "without it"), *map(self._row, self.stages)]
        return "\n".join([head, *aligned(rows, texts=1), self.verdict, *filter(None, [self.remedy])])

    def to_dict(self) -> dict[str, Any]:
        """Returns the profile as JSON values."""
        return asdict(self) | {
            "examples_per_second_per_core": self.examples_per_second_per_core,
            "limiting": self.limiting,
            "verdict": self.verdict,
            "stages": [self._stage_dict(stage) for stage in self.stages],
        }

    def chart(self) -> str:
        """Returns an HTML figure with a bar per stage, for `tfopt.page.Section(charts=...)`."""
        return chart_of(self.to_dict())

    def _leading(self) -> list[StageProfile]:
        """Returns the stages without which the pipeline would be fastest; none if the gain is not worthwhile."""
        best = max((stage.speedup_without for stage in self.stages), default=0.0)
        if best < _WORTHWHILE:
            return []
        return [stage for stage in self.stages if stage.speedup_without >= best / _CLEARLY]

    def _without(self, stage: StageProfile) -> str:
        speed = self.examples_per_second_without(stage)
        return "nothing would be left" if speed is None else f"{speed:,.0f} examples/s"

    def _row(self, stage: StageProfile) -> tuple[str, ...]:
        speed = self.examples_per_second_without(stage)
        return (
            stage.name,
            f"{stage.ms_per_example:,.3f}",
            f"{stage.parallelism}",
            f"{stage.busy_percent:.0f} %",
            "" if speed is None else f"{speed:,.0f}/s",
        )

    def _stage_dict(self, stage: StageProfile) -> dict[str, Any]:
        values = asdict(stage) | {"examples_per_second_without": self.examples_per_second_without(stage)}
        del values["speedup_without"]  # may be infinite, which JSON cannot hold
        return values


def chart_of(profile: Mapping[str, Any]) -> str:
    """Returns the chart of a profile as `PipelineProfile.to_dict` returns it."""
    bars = [
        Bar(
            stage["name"],
            stage["ms_per_example"],
            f"{stage['ms_per_example']:,.3f} ms, busy {stage['busy_percent']:.0f} %",
            tone="worse" if stage["name"] == profile["limiting"] else "plain",
            meaning="limits the input" if stage["name"] == profile["limiting"] else "another stage",
        )
        for stage in profile["stages"]
    ]
    return bar_chart(
        bars,
        title=f"Input pipeline: {profile['examples_per_second']:,.0f} examples per second",
        description=f"Work of each stage in milliseconds per example. {profile['verdict']}",
    )
