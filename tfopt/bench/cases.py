"""What a suite is made of: cases, each a baseline and its variants, measured in turn and checked for their result."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import keras

from tfopt.bench.ceilings import ceilings
from tfopt.bench.conditions import Conditions
from tfopt.bench.figures import figures
from tfopt.bench.memory import MemoryMeter
from tfopt.measure import StepTimes, interleave
from tfopt.model.flops import model_flops

REPEATS = 6
"""Turns of each variant: with six the interval covers 95 %."""

Timer = Callable[[], StepTimes]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the workloads are.

    Attributes:
        batch_size: Examples a step, for the `digits` net.
        width: Factor on the `digits` net's channels.
        steps: Steps to time in each turn.
        photos: How many JPEG files.
        resnet: Batch size for ResNet-50; None leaves it out.
        seeds: Trainings of each variant whose accuracy is compared.
        repeats: Turns of each variant at most.
    """

    batch_size: int
    width: int
    steps: int
    photos: int
    resnet: int | None
    seeds: tuple[int, ...]
    repeats: int = 2 * REPEATS


# All suites together in five minutes on two cores.
CPU = Scale(batch_size=64, width=1, steps=30, photos=192, resnet=None, seeds=(0,))
GPU = Scale(batch_size=256, width=4, steps=200, photos=4096, resnet=256, seeds=(0, 1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether a variant computes what the baseline computes.

    Attributes:
        what: What was compared.
        values: What was compared: an accuracy for each training, or how many values differ.
        passed: Whether they agree.
        text: In a few words, for the table.
    """

    what: str
    values: tuple[float, ...]
    passed: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train.

    Attributes:
        name: For the table.
        note: What it is, in a few words.
        timer: Makes what measures it; what must be cleaned up afterwards goes on the stack.
        values: Makes what `Case.judge` compares with the baseline's. None: it is not checked.
        recommended: Whether it is what tfopt recommends for this device.
        ceiling: Whether it is no way to train, but what the others can reach at most. Of several the slowest counts.
        gpus: How many it trains on, whose clocks and energy are read. 0: none, as where reading would disturb.
        dtype: What its matrix products are computed in, as for `measure.matmul_tflops`. None: not said.
    """

    name: str
    note: str
    timer: Callable[[ExitStack], Timer]
    values: Callable[[], Sequence[float]] | None = None
    recommended: bool = False
    ceiling: bool = False
    gpus: int = 1
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question put to this machine. The first variant is the baseline.

    Attributes:
        suite: The suite's name.
        workload: What is trained.
        question: In words.
        unit: What one sample times.
        variants: At least two; the first is the baseline.
        judge: From the baseline's values and a variant's, whether their results agree. None: not checked.
        repeats: Turns of each variant.
        profile: Makes a profile of the input as JSON values, as `PipelineProfile.to_dict` does. None: there is none.
        gate: Checks the model in other dtype policies, as `PrecisionReport.to_dict` does. None: it is not checked.
        communication: From the times by variant, what the replicas send each other, and what the step would take on
            more of them, as JSON values. None: there is one replica.
        model: Makes the model, whose operations are held against the device's own rates. None: nothing is.
        limit_seconds: After this time it is ended: it hangs.
    """

    suite: str
    workload: str
    question: str
    unit: str
    variants: Sequence[Variant]
    judge: Callable[[Sequence[float], Sequence[float]], Check] | None = None
    repeats: int = REPEATS
    profile: Callable[[], dict[str, Any]] | None = None
    gate: Callable[[], list[dict[str, Any]]] | None = None
    communication: Callable[[Mapping[str, StepTimes]], dict[str, Any]] | None = None
    model: Callable[[], keras.Model] | None = None
    limit_seconds: float = 900.0

    @property
    def ticks(self) -> int:
        """How many times `run` reports progress."""
        return len(self.variants) * (self.repeats + (self.judge is not None))

    def run(self, on_tick: Callable[[str], None]) -> dict[str, Any]:
        """Measures and checks every variant; returns the case's part of the results document."""
        with ExitStack() as stack, Conditions(max(variant.gpus for variant in self.variants)) as conditions:
            meters = {variant.name: MemoryMeter(partial(variant.timer, stack)) for variant in self.variants}
            timers = {name: conditions.during(name, meter) for name, meter in meters.items()}
            times = interleave(timers, self.repeats, on_progress=lambda name, turn: on_tick(name))
        peaks = {name: meter.peak_mib for name, meter in meters.items()}
        del meters, timers  # and with them the models, before others are trained
        checks = self._checks(on_tick)
        baseline, ceiling_names = self.variants[0].name, [variant.name for variant in self.variants if variant.ceiling]
        limit = max(ceiling_names, key=lambda name: times[name].median_ms, default=None)
        operations = model_flops(self.model()).per_example if self.model else None
        rates = ceilings({v.dtype for v in self.variants if v.dtype}) if self.model else None
        measured = {
            "suite": self.suite,
            "workload": self.workload,
            "question": self.question,
            "unit": self.unit,
            "baseline": baseline,
            "limit": limit,
            "operations_per_example": operations,
            "ceilings": rates,
        }
        variants = [
            {
                "name": variant.name,
                "note": variant.note,
                "recommended": variant.recommended,
                "ceiling": variant.ceiling,
                "dtype": variant.dtype,
                "check": asdict(checks[variant.name]) if variant.name in checks else None,
                "peak_memory_mib": peaks[variant.name],
                "conditions": conditions.of(variant.name, variant.gpus),
            }
            for variant in self.variants
        ]
        return measured | {
            "variants": [variant | figures(variant, measured, times) for variant in variants],
            "profile": self.profile and self.profile(),
            "gate": self.gate and self.gate(),
            "communication": self.communication and self.communication(times),
        }

    def _checks(self, on_tick: Callable[[str], None]) -> dict[str, Check]:
        checks: dict[str, Check] = {}
        expected: Sequence[float] = ()
        if self.judge is None:
            return checks
        for variant in self.variants:
            if variant.values is not None:
                values = variant.values()
                expected = values if variant is self.variants[0] else expected
                checks[variant.name] = self.judge(expected, values)
            on_tick(variant.name)
        return checks
