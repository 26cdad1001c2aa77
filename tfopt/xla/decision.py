"""What was decided about XLA for a model, and the figures it follows from."""

import math
from dataclasses import dataclass
from typing import Any, Self

import keras

from tfopt.measure import Comparison, StepTimes, compare
from tfopt.xla.padding import Pad
from tfopt.xla.shapes import BatchShapes
from tfopt.xla.toggles import set_jit


@dataclass(frozen=True, slots=True, kw_only=True)
class JitDecision:
    """Whether XLA should be on for a model, and the measurement behind it.

    Attributes:
        enabled: Whether it should.
        reason: In words.
        comparison: How many times as fast the step ran with XLA, with its interval; None if it could not run.
        compile_seconds: What XLA added to the first step. It adds it for each batch shape.
        shapes: The batch shapes that the dataset yields.
        break_even_steps: Steps after which compilation, for every shape, has paid for itself; None if it never does.
        planned_steps: As given to `decide`.
        drift: Distance between two trainings of four steps from one state, with XLA and without, over the distance
            travelled (after 64 steps, where four move nothing). With float32 rounding it stays below 0.001, with
            bfloat16 below 0.1; another computation gives 0.3 and more. It is taken without dropout, whose masks XLA
            draws differently. None where it is unknown, or was not measured since XLA stays off for another reason.
        pad: What padding every batch to one shape would bring, where too many shapes are why XLA stays off.
        off: The samples without XLA.
        on: The samples with XLA.
    """

    enabled: bool
    reason: str
    comparison: Comparison | None = None
    compile_seconds: float | None = None
    shapes: BatchShapes | None = None
    break_even_steps: int | None = None
    planned_steps: int | None = None
    drift: float | None = None
    pad: Pad | None = None
    off: StepTimes | None = None
    on: StepTimes | None = None

    @property
    def speedup(self) -> float | None:
        """How many times as fast the step ran with XLA."""
        return self.comparison.ratio if self.comparison else None

    def apply(self, model: keras.Model) -> None:
        """Sets the model as decided."""
        set_jit(model, self.enabled)

    def to_dict(self) -> dict[str, Any]:
        """JSON, raw samples included. A drift that is no finite number is null."""
        names = ("enabled", "reason", "speedup", "compile_seconds", "break_even_steps", "planned_steps")
        drift = self.drift if self.drift is not None and math.isfinite(self.drift) else None
        nested = {name: getattr(self, name) for name in ("comparison", "shapes", "pad", "off", "on")}
        plain = {name: getattr(self, name) for name in names} | {"drift": drift}
        return plain | {name: part and part.to_dict() for name, part in nested.items()}

    def __str__(self) -> str:
        return f"XLA {'on' if self.enabled else 'off'}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Whether XLA pays, from its figures alone.

    Attributes:
        off: The samples without XLA.
        on: The samples with XLA.
        comparison: How many times as fast the step ran with XLA.
        compile_seconds: What compiling took.
        shapes: The batch shapes.
        break_even_steps: Steps after which compilation has paid for itself; None if it never does.
        planned_steps: Steps planned in all; None: unknown.
    """

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
        """Weighs the step's gain against compiling it for every shape."""
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
        """Whether the step is faster beyond doubt."""
        return self.comparison.verdict == "faster"

    @property
    def pays(self) -> bool:
        """Whether it pays within the steps planned, or some day where these are unknown."""
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
            return f"{found}, and new ones come faster than it pays for them"
        paid = f"{found}, paid back after {self.break_even_steps:,} steps"
        if self.planned_steps is not None:
            return f"{paid} of {self.planned_steps:,} planned"
        epoch = self.shapes.steps_per_epoch or 0
        return f"{paid} (an epoch has {epoch:,})" if epoch > 1 else paid


def break_even(gain_seconds: float, compile_seconds: float, shapes: BatchShapes) -> int | None:
    """Steps n from which on n × gain is at least compile_seconds × the shapes that n steps bring; None if never."""
    rate = shapes.new_per_batch * compile_seconds
    if gain_seconds <= rate or gain_seconds <= 0:
        return None
    later = (shapes.count - shapes.new_per_batch * shapes.batches_read) * compile_seconds / (gain_seconds - rate)
    return math.ceil(max(shapes.count * compile_seconds / gain_seconds, later))
