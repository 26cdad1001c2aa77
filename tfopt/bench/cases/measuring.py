"""Measures a case: variants in turn, A B A B …, each turn handed over as it ends, then their results checked."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from tfopt.bench.cases import Case, Timer, Variant
from tfopt.bench.cases.device import GpuReadings, MemoryMeter, device_rates
from tfopt.bench.results import UNDER_WAY, CaseResult, GpuConditions, VariantResult
from tfopt.errors import DeviceMemoryError, UnsupportedError, summarize_error
from tfopt.hardware.host_activity import OtherProcesses
from tfopt.measure import StepTimes
from tfopt.memory.out_of_memory import is_out_of_memory
from tfopt.model.flops import functional_flops

_TURNS_SHARE = 0.8
"""Of a limited time; the rest is for the checks."""

Report = Callable[[CaseResult, str], None]


def measure(
    case: Case,
    report: Report = lambda result, variant: None,
    *,
    earlier: CaseResult | None = None,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> CaseResult:
    """Measures and checks every variant.

    A variant is built, and compiles, in its own first turn. One that this machine cannot run keeps the reason as
    `refused`, and the others go on. Any other error is the case's.

    Args:
        case: The case.
        report: Called with what was measured so far and the variant's name, after each turn and each check.
        earlier: What another process measured of the case: its turns and checks are kept, and only the missing ones are
            taken.
        seconds: Time for the case. Too little of it means fewer turns, and at least one.
        clock: Seconds, monotonic.
    """
    return _Measurement(case, report, clock() + _TURNS_SHARE * seconds, clock, earlier).run()


class _Measurement:
    def __init__(
        self, case: Case, report: Report, due: float, clock: Callable[[], float], earlier: CaseResult | None = None
    ):
        self._case, self._report, self._due, self._clock = case, report, due, clock
        self._results = {
            variant.name: VariantResult(
                name=variant.name,
                note=variant.note,
                techniques=variant.techniques,
                recommended=variant.recommended,
                ceiling=variant.ceiling,
                dtype=variant.dtype,
            )
            for variant in case.variants
        }
        self._result = replace(case.planned, unfinished=UNDER_WAY)
        if earlier is not None:
            # Figures are worked out again at the end, from all the turns.
            self._results |= {variant.name: replace(variant, metrics=None) for variant in earlier.variants}
        self._earlier = dict(self._results)
        self._earlier_others = None if earlier is None else earlier.others_cpu_percent

    def run(self) -> CaseResult:
        self._take_turns()
        self._check()
        case = self._case
        times = {name: one.times for name, one in self._results.items() if one.times}
        complete = len(times) == len(case.variants)
        result = replace(
            self._so_far(),
            profile=case.profile and case.profile(),
            gate=tuple(case.gate()) if case.gate else None,
            communication=case.communication(times) if case.communication and complete else None,
        )
        unfinished = None if self._rounds() >= case.repeats else "the budget ran out"
        return replace(result.with_metrics(), unfinished=unfinished)

    def _rounds(self) -> int:
        """Turns that every variant has."""
        return min((one.turns for one in self._results.values() if not one.refused), default=self._case.repeats)

    def _take_turns(self) -> None:
        case = self._case
        with ExitStack() as stack, GpuReadings(max(variant.gpus for variant in case.variants)) as readings:
            stacks = {variant.name: stack.enter_context(ExitStack()) for variant in case.variants}
            others = OtherProcesses()
            meters = {v.name: MemoryMeter(partial(v.timer, stacks[v.name])) for v in case.variants}
            first = self._rounds()
            # What says most comes first, should the run be stopped in its first turn.
            baseline, *rest = case.variants
            ordered = [baseline, *sorted(rest, key=lambda variant: not (variant.recommended or variant.ceiling))]
            for turn in range(first, case.repeats):
                for variant in ordered:
                    name = variant.name
                    if self._results[name].refused or self._results[name].turns > turn:
                        continue
                    if turn > first and self._clock() >= self._due:
                        return
                    if times := self._attempt(variant, readings.during(name, meters[name])):
                        self._note_others(others.cpu_percent())
                        self._add(variant, times, meters[name], readings)
                    else:
                        # What it holds on the device, the others need.
                        del meters[name]
                        stacks[name].close()
                        gc.collect()
                        self._report(self._so_far(), name)

    def _note_others(self, percent: float | None) -> None:
        known = [one for one in (percent, self._earlier_others) if one is not None]
        self._result = replace(self._result, others_cpu_percent=max(known, default=None))

    def _attempt(self, variant: Variant, timer: Timer) -> StepTimes | None:
        """Takes a turn; None if the machine cannot run the variant, which is noted."""
        try:
            return timer()
        except Exception as error:  # noqa: BLE001  raised again unless the machine lacks something
            self._refuse(variant, error)
            return None

    def _refuse(self, variant: Variant, error: Exception) -> None:
        if not _is_refusal(error):
            raise error
        self._results[variant.name] = replace(self._results[variant.name], refused=summarize_error(error))

    def _add(self, variant: Variant, turn: StepTimes, meter: MemoryMeter, readings: GpuReadings) -> None:
        before = self._results[variant.name]
        taken = before.times.repeats_ms if before.times else ()
        first = before.times or turn
        earlier = self._earlier[variant.name]
        peaks = [peak for peak in (earlier.peak_memory_mib, meter.peak_mib) if peak is not None]
        self._results[variant.name] = replace(
            before,
            times=replace(first, repeats_ms=(*taken, *turn.repeats_ms)),
            peak_memory_mib=max(peaks, default=None),
            conditions=_together(earlier.conditions, readings.of(variant.name, variant.gpus)),
        )
        self._report(self._so_far(), variant.name)

    def _check(self) -> None:
        case = self._case
        if case.model is not None:
            dtypes = {variant.dtype for variant in case.variants if variant.dtype}
            flops = functional_flops(case.model()).per_example
            operations = None if flops is None else round(flops)
            self._result = replace(self._result, operations_per_example=operations, ceilings=device_rates(dtypes))
        expected = None
        to_check = [v.name for v in case.variants if v.values is not None and self._results[v.name].check is None]
        for variant in case.variants if case.judge and to_check else ():
            found = self._results[variant.name]
            if variant is not case.variants[0] and variant.name not in to_check:
                continue
            if variant.values is not None and found.times is not None:
                try:
                    values = variant.values()
                except Exception as error:  # noqa: BLE001  as above
                    self._refuse(variant, error)
                    continue
                if variant is case.variants[0]:
                    expected = values
                if expected is not None and case.judge is not None:
                    self._results[variant.name] = replace(found, check=case.judge(expected, values))
            self._report(self._so_far(), variant.name)

    def _so_far(self) -> CaseResult:
        return replace(self._result, variants=tuple(self._results.values()))


def _together(earlier: GpuConditions | None, now: GpuConditions | None) -> GpuConditions | None:
    """Conditions of the turns here, with what throttled those of an earlier process."""
    if earlier is None or now is None:
        return now or earlier
    return replace(now, throttle_reasons=tuple(dict.fromkeys((*earlier.throttle_reasons, *now.throttle_reasons))))


def _is_refusal(error: Exception) -> bool:
    """Whether an error says that this machine cannot run the variant."""
    return isinstance(error, UnsupportedError | DeviceMemoryError) or is_out_of_memory(error)
