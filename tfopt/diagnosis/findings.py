"""What `diagnose` found: each cause with what it costs, and what a step takes without any of them."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from tfopt.causes.catalogue import WORTH_SHARE
from tfopt.files import write_atomic
from tfopt.measure import Comparison, StepTimes
from tfopt.text import Shown, figure, listed, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseCost:
    """A cause, and what it costs: the training as it stands against the training without it."""

    name: str
    """Its name, such as "input", "callback CSVLogger" or "XLA is off"."""
    cost_ms: float
    """Milliseconds a step that it takes; below 0 if the training is slower without it."""
    interval_ms: tuple[float, float]
    """The 95 % interval of `cost_ms`."""
    share: float
    """`cost_ms` as a share of a step as it stands."""
    evidence: str
    """What was measured, in a sentence."""
    remedy: str
    """What to do: lines of code, or a command. Empty if nothing is worth changing."""
    gain: float | None = None
    """How many times as fast training is predicted to run with the remedy; None if that is unknown."""
    at_most: bool = False
    """Whether the remedy may gain less: it has not been tried, only its cause taken away."""

    @property
    def counts(self) -> bool:
        """Whether it is worth changing: the interval lies above 0 and the share is at least 3 %."""
        return self.interval_ms[0] > 0 and self.share >= WORTH_SHARE

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """The interval of `gain`, as far as that of `cost_ms` goes; None if `gain` is. It may end in infinity."""
        if self.gain is None or self.cost_ms <= 0:
            return None
        saved = (1 - 1 / self.gain) / self.cost_ms
        low, high = (1 - saved * max(0.0, end) for end in self.interval_ms)
        return 1 / low if low > 0 else math.inf, 1 / high if high > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, and whether it counts."""
        return asdict(self) | {"counts": self.counts}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores the result of `to_dict`."""
        given = {field.name: values[field.name] for field in fields(cls)}
        return cls(**given | {"interval_ms": tuple(values["interval_ms"])})


@dataclass(frozen=True, slots=True)
class NotTested:
    """A cause that could not be tested here."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something about the machine that slows training down, whose cost cannot be measured from here."""

    name: str
    evidence: str
    """What was read."""
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(Shown):
    """What slows training down, cause by cause."""

    now: StepTimes
    """A step of the training as it stands, with its share of validation and of other pauses between steps."""
    floor: StepTimes
    """A step with every cause taken away at once: the computation."""
    causes: tuple[CauseCost, ...]
    """Every cause tested, the most expensive first."""
    not_tested: tuple[NotTested, ...]
    """Causes that could not be tested here, each with the reason."""
    computation: str
    """What the remaining computation does, in sentences: its rate beside the device's, and the costliest layers."""
    environment: Mapping[str, Any]
    """What it was measured on, as `tfopt.measure.environment` returns it."""
    together: Comparison | None = None
    """How many times as fast steps run through `fit` without all causes that count, pauses between them aside; None if
    there are not several."""
    date: str = ""
    """The day it was measured, as in 2026-11-26."""
    noticed: tuple[Noticed, ...] = ()
    """What slows it down from outside, such as other processes: read, not measured."""

    @property
    def worth_changing(self) -> tuple[CauseCost, ...]:
        """The causes that count, the most expensive first."""
        return tuple(sorted((cause for cause in self.causes if cause.counts), key=lambda cause: -cause.cost_ms))

    @property
    def too_noisy(self) -> tuple[CauseCost, ...]:
        """Causes that do not count, but whose interval reaches beyond 3 % of a step: they may be worth changing."""
        least_ms = WORTH_SHARE * self.now.median_ms
        return tuple(cause for cause in self.causes if not cause.counts and cause.interval_ms[1] > least_ms)

    @property
    def floor_ms(self) -> float:
        """The median step with every cause taken away."""
        return self.floor.median_ms

    @property
    def unexplained_ms(self) -> float:
        """The median step, less `floor_ms` and the causes that count. Below 0 if causes overlap: if taking away either
        of two saves the same time."""
        return self.now.median_ms - self.floor_ms - sum(cause.cost_ms for cause in self.worth_changing)

    @property
    def verdict(self) -> str:
        """The most expensive cause and what it costs, or that nothing is worth changing, in a sentence."""
        if not self.causes:
            return "No cause could be tested here."
        if self.worth_changing:
            return self._most_expensive()
        if self.too_noisy:
            names = listed([cause.name for cause in self.too_noisy], 3)
            return f"Too noisy to tell whether anything is worth changing: {names} may take 3 % of a step or more."
        computation = self.floor_ms / self.now.median_ms
        if computation >= 1 - WORTH_SHARE:
            of_step = percent(min(round(computation, 2), 1.0))
            return f"Nothing here is worth changing: {of_step} of a step is the computation itself."
        return (
            "No single cause is worth changing: each takes less than 3 % of a step, "
            f"and the computation itself {percent(round(computation, 2))}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON: the raw samples, every cause, and the figures and the verdict derived from them."""
        return {
            "verdict": self.verdict,
            "now": self.now.to_dict(),
            "floor": self.floor.to_dict(),
            "floor_ms": self.floor_ms,
            "unexplained_ms": self.unexplained_ms,
            "causes": [cause.to_dict() for cause in self.causes],
            "noticed": [asdict(each) for each in self.noticed],
            "not_tested": [asdict(each) for each in self.not_tested],
            "computation": self.computation,
            "together": self.together and self.together.to_dict(),
            "environment": dict(self.environment),
            "date": self.date,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores the result of `to_dict`, ignoring the derived figures."""
        return cls(
            now=StepTimes.from_dict(values["now"]),
            floor=StepTimes.from_dict(values["floor"]),
            causes=tuple(map(CauseCost.from_dict, values["causes"])),
            noticed=tuple(Noticed(**each) for each in values["noticed"]),
            not_tested=tuple(NotTested(**each) for each in values["not_tested"]),
            computation=values["computation"],
            together=(together := values["together"]) and Comparison.from_dict(together),
            environment=values["environment"],
            date=values["date"],
        )

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes it as a self-contained HTML page and returns the page's path.

        Raises:
            tfopt.errors.UnsupportedError: If jinja2 is not installed.
            OSError: If the file cannot be written.

        Example:
            >>> tfopt.diagnose(model, data).to_html("diagnosis.html")
            PosixPath('diagnosis.html')
        """
        from tfopt.diagnosis.waterfall import page

        write_atomic(path, page(self))
        return Path(path)

    def __str__(self) -> str:
        from tfopt.diagnosis.waterfall import text

        return text(self)

    def __repr__(self) -> str:
        # The first line of the text may be only a part of the verdict.
        return f"<Diagnosis: {self.verdict}>"

    def _most_expensive(self) -> str:
        """Names the most expensive cause, and those that may be as expensive."""
        first, *others = self.worth_changing
        of_step = f"{figure(first.cost_ms)} ms of a {figure(self.now.median_ms)} ms step"
        rivals = [
            f"{other.name} ({figure(other.cost_ms)} ms)"
            for other in others
            if other.interval_ms[1] >= first.interval_ms[0] and other.cost_ms >= first.cost_ms / 2
        ]
        if rivals:
            close = f"{first.name} ({of_step}), {listed(rivals, 2)}"
            return f"The most expensive causes, too close to tell apart: {close}."
        return f"The most expensive cause: {first.name}, {of_step} ({percent(round(first.share, 2))})."
