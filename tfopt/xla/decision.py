"""The decision about XLA for a model, and the figures behind it."""

import math
from dataclasses import dataclass
from typing import Any, Self

import keras

from tfopt.measure import Comparison, StepTimes, compare
from tfopt.xla.shapes import BatchShapes, Pad
from tfopt.xla.toggles import set_jit


@dataclass(frozen=True, slots=True, kw_only=True)
class JitDecision:
    """Whether XLA should be on for a model, and the measurement behind it."""

    enabled: bool
    """Whether to switch XLA on."""
    reason: str
    """Why, as a sentence."""
    comparison: Comparison | None = None
    """Speed with XLA over speed without, with its interval; None if the step could not run."""
    compile_seconds: float | None = None
    """What XLA adds to the first step with each batch shape."""
    shapes: BatchShapes | None = None
    """Batch shapes in the dataset."""
    break_even_steps: int | None = None
    """Steps after which compiling every shape has paid for itself; None if it never does."""
    planned_steps: int | None = None
    """As passed to `decide`."""
    drift: float | None = None
    """Distance between two four-step trainings from one state, with and without XLA, over the distance moved (64 steps
    if four move nothing). float32 rounding gives less than 0.001, bfloat16 less than 0.1, a different computation 0.3
    or more. Measured without dropout, whose masks XLA draws differently. None if unknown, or if XLA is off for another
    reason."""
    pad: Pad | None = None
    """What padding every batch to one shape would gain, if XLA is off because there are too many shapes."""
    off: StepTimes | None = None
    """Samples without XLA."""
    on: StepTimes | None = None
    """Samples with XLA."""

    @property
    def speedup(self) -> float | None:
        """Speed with XLA over speed without."""
        return self.comparison.ratio if self.comparison else None

    def apply(self, model: keras.Model) -> None:
        """Switches XLA on or off for `model`, as decided."""
        set_jit(model, self.enabled)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values, including the raw samples. A drift that is not finite becomes null."""
        names = ("enabled", "reason", "speedup", "compile_seconds", "break_even_steps", "planned_steps")
        drift = self.drift if self.drift is not None and math.isfinite(self.drift) else None
        nested = {name: getattr(self, name) for name in ("comparison", "shapes", "pad", "off", "on")}
        plain = {name: getattr(self, name) for name in names} | {"drift": drift}
        return plain | {name: part and part.to_dict() for name, part in nested.items()}

    def __str__(self) -> str:
        return f"XLA {'on' if self.enabled else 'off'}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The figures that show whether XLA pays; see `JitDecision` for the fields."""

    off: StepTimes
    on: StepTimes
    comparison: Comparison
    compile_seconds: float
    shapes: BatchShapes
    break_even_steps: int | None
    planned_steps: int | None

    @classmethod
    def of(
        cls, off: StepTimes, on: StepTimes, compile_seconds: float, shapes: BatchShapes, planned_steps: int | None
    ) -> Self:
        """Weighs the gain per step against compiling every shape."""
        comparison = compare(off, on)
        gain = (off.median_ms - on.median_ms) / 1000 if comparison.verdict == "faster" else 0.0
        return cls(
            off=off,
            on=on,
            comparison=comparison,
            compile_seconds=compile_seconds,
            shapes=shapes,
            break_even_steps=break_even(gain, compile_seconds, shapes),
            planned_steps=planned_steps,
        )

    @property
    def faster(self) -> bool:
        """Whether the step is faster, by its interval."""
        return self.comparison.verdict == "faster"

    @property
    def pays(self) -> bool:
        """Whether it pays within the planned steps, or at all if these are unknown."""
        if self.break_even_steps is None:
            return False
        return self.planned_steps is None or self.planned_steps >= self.break_even_steps

    def __str__(self) -> str:
        found = f"with it a step runs {self.comparison}; compiling took {self.compile_seconds:.2g} s"
        if self.shapes.count > 1:
            found += f", for each of {self.shapes}"
        if not self.faster:
            return found
        if self.break_even_steps is None:
            return f"{found}, and new shapes come faster than they pay off"
        paid = f"{found}, paid back after {self.break_even_steps:,} steps"
        if self.planned_steps is not None:
            return f"{paid} of {self.planned_steps:,} planned"
        epoch = self.shapes.steps_per_epoch or 0
        return f"{paid} (an epoch has {epoch:,})" if epoch > 1 else paid


def break_even(gain_seconds: float, compile_seconds: float, shapes: BatchShapes) -> int | None:
    """Smallest number of steps whose gain covers compiling the shapes they bring; None if there is none."""
    rate = shapes.new_per_batch * compile_seconds
    if gain_seconds <= rate or gain_seconds <= 0:
        return None
    later = (shapes.count - shapes.new_per_batch * shapes.batches_read) * compile_seconds / (gain_seconds - rate)
    return math.ceil(max(shapes.count * compile_seconds / gain_seconds, later))
