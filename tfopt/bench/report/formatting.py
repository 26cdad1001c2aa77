"""A run's figures as text: cells of a table, bars of a chart, and the sentences beside them."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tfopt.bench.results import CaseResult, Run, VariantResult
from tfopt.bench.results.changes import Change
from tfopt.measure import compare
from tfopt.page import Bar, Table

_TONES: dict[str, Literal["baseline", "better", "worse"]] = {
    "baseline": "baseline",
    "faster": "better",
    "slower": "worse",
    "changes the result": "worse",
}


def number(value: float) -> str:
    """Two decimals from 0.1 to 10, else about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def ratio(value: float, interval: Sequence[float]) -> str:
    """A ratio with its interval."""
    return f"{number(value)}× [{number(interval[0])}–{number(interval[1])}]"


def name(variant: VariantResult) -> str:
    """Name, with a star if tfopt recommends the variant for the device, and a mark if it was throttled."""
    return f"{variant.name}{' *' * variant.recommended}{' !' * bool(_throttle_reasons(variant))}"


def step_time(variant: VariantResult) -> str:
    """Milliseconds per step, with the interval."""
    if variant.times is None or variant.metrics is None:
        return ""
    low, high = variant.metrics.interval_ms
    return f"{number(variant.times.median_ms)} [{number(low)}–{number(high)}]"


def speed(variant: VariantResult) -> str:
    """Ratio to the baseline, with its interval."""
    if variant.metrics is None or variant.metrics.verdict == "not compared":
        return ""
    comparison = variant.metrics.comparison
    return "1×" if comparison is None else ratio(comparison.ratio, comparison.interval)


def memory(variant: VariantResult) -> str:
    """MiB of GPU memory at the peak."""
    return "" if variant.peak_memory_mib is None else f"{variant.peak_memory_mib:,.0f}"


def check(variant: VariantResult) -> str:
    """What the comparison of results found."""
    if variant.check is not None:
        return variant.check.text
    return "not checked" if variant.times else ""


def verdict(variant: VariantResult) -> str:
    """What to make of the variant."""
    if variant.refused:
        turns = f" after {variant.turns} turn{'s' * (variant.turns > 1)}" if variant.turns else ""
        return f"refused{turns}: {variant.refused}"
    if variant.verdict == "faster" and variant.ceiling:
        return "the ceiling"
    return "slower: leave it off" if variant.verdict == "slower" else variant.verdict or "not measured"


def _first_step(variant: VariantResult) -> str:
    return f"{number(variant.times.first_step_seconds)} s" if variant.times else ""


def _of_ceiling(variant: VariantResult) -> str:
    share = variant.metrics.of_ceiling if variant.metrics else None
    return number(share.ratio) if share else ""


def _mfu(variant: VariantResult) -> str:
    percent = variant.metrics.mfu_percent if variant.metrics else None
    return "" if percent is None else number(percent)


def _joules(variant: VariantResult) -> str:
    value = variant.metrics.joules_per_thousand_examples if variant.metrics else None
    return "" if value is None else number(value)


def _conditions(variant: VariantResult) -> str:
    found = variant.conditions
    if found is None:
        return ""
    clock, celsius, watts = found.sm_clock_mhz, found.gpu_temperature_celsius, found.gpu_power_watts
    parts = (
        f"{clock[1]:g} MHz (lowest {clock[0]:g})" if clock else "",
        f"{celsius:g} °C" if celsius else "",
        f"{watts:.0f} W" if watts else "",
    )
    return ", ".join(filter(None, parts))


class _Column(NamedTuple):
    header: str
    align: str
    cell: Callable[[VariantResult], str]
    always: bool = True  # else left out if it is empty


_COLUMNS = (
    _Column("Variant", "l", name),
    _Column("ms a step", "r", step_time),
    _Column("Speed", "r", speed),
    _Column("Of the ceiling", "r", _of_ceiling, always=False),
    _Column("MFU %", "r", _mfu, always=False),
    _Column("J / 1,000", "r", _joules, always=False),
    _Column("First step", "r", _first_step),
    _Column("Peak MiB", "r", memory, always=False),
    _Column("GPU", "l", _conditions, always=False),
    _Column("Result", "l", check),
    _Column("Verdict", "l", verdict),
)


def table(case: CaseResult) -> Table:
    """A row for each variant; columns without a known value are left out."""
    columns = [column for column in _COLUMNS if column.always or any(map(column.cell, case.variants))]
    rows = [[column.cell(variant) for column in columns] for variant in case.variants]
    return Table([column.header for column in columns], rows, align="".join(column.align for column in columns))


def bars(case: CaseResult) -> list[Bar]:
    """A bar for each measured variant, as long as it is fast."""
    found = []
    for variant in case.measured:
        metrics = variant.metrics
        if metrics is None or metrics.verdict == "not compared":
            continue
        comparison = metrics.comparison
        low, high = comparison.interval if comparison else (None, None)
        found.append(
            Bar(
                label=variant.name,
                value=comparison.ratio if comparison else 1.0,
                text=speed(variant),
                low=low,
                high=high,
                tone="baseline" if variant.ceiling else _TONES.get(metrics.verdict, "unclear"),
            )
        )
    return found


def device(run: Run) -> str:
    """What the run was measured on, in a line."""
    host, packages, names = run.environment["host"], run.environment["packages"], run.gpus
    gpus = f"{len(names)} × {names[0]}" if names else "no GPU"
    processor = f"{host['cpu_model'] or 'unknown CPU'} ({host['cpus']:g} CPUs)"
    return f"{processor}, {gpus}, TensorFlow {packages['tensorflow']}, Keras {packages['keras']}"


def lead(run: Run) -> str:
    """What the run found, in a few sentences."""
    measured = [variant for case in run.cases for variant in case.measured]
    end = "".join(f" {sentence}" for sentence in _shortcomings(run))
    if not measured:
        return f"Nothing was measured.{end}"
    apart = [variant for case in run.cases if case.suite != "stack" for variant in case.measured]
    helped = [(v, _ratio(v)) for v in _with_verdict(apart, "faster") if not v.ceiling]
    listed = ", ".join(f"{v.name} ({number(r)}×)" for v, r in sorted(helped, key=lambda pair: -pair[1]))
    first = f"Faster on this machine: {listed}." if helped else "Nothing measured here was faster than its baseline."
    hurt = ", ".join(v.name for v in _with_verdict(apart, "slower"))
    wrong = ", ".join(v.name for v in _with_verdict(measured, "changes the result"))
    return (
        f"{_stacked(run)}{first}{f' Slower: {hurt}.' * bool(hurt)}{f' Changes the result: {wrong}.' * bool(wrong)}{end}"
    )


def _shortcomings(run: Run) -> list[str]:
    """What failed, is missing, or is not as it seems."""
    failed = [" on ".join(case.address) for case in run.cases if case.error]
    cut = [" on ".join(case.address) for case in run.cases if case.unfinished]
    refused = [f"{v.name} ({' on '.join(case.address)})" for case in run.cases for v in case.variants if v.refused]
    found = [
        f"Failed: {', '.join(failed)}." if failed else "",
        f"Unfinished: {', '.join(cut)}." if cut else "",
        f"Refused on this machine: {', '.join(refused)}." if refused else "",
        "Small sizes, as on a machine without a GPU: they say nothing about one." if run.small else "",
        f"Resumed elsewhere than begun: {'; '.join(run.resumed)}." if run.resumed else "",
    ]
    return list(filter(None, found))


def _stacked(run: Run) -> str:
    """What all techniques together bring; empty if that was not measured."""
    found = [(case.workload, v) for case in run.cases if case.suite == "stack" for v in case.measured if v.recommended]
    listed = ", ".join(f"{workload} {number(_ratio(v))}×" for workload, v in found if _ratio(v))
    return f"From everything off to what is recommended: {listed}. " if listed else ""


def _with_verdict(variants: Sequence[VariantResult], stated: str) -> list[VariantResult]:
    return [v for v in variants if v.verdict == stated]


def _ratio(variant: VariantResult) -> float:
    return variant.metrics.comparison.ratio if variant.metrics and variant.metrics.comparison else 0.0


def sentences(case: CaseResult) -> list[str]:
    """What there is to say about a case beside its table."""
    found = (unfinished(case), recommended(case), reached(case), _efficiency(case), throttled(case), _sent(case))
    return [sentence for sentence in found if sentence]


def unfinished(case: CaseResult) -> str:
    """Why turns or checks of a case are missing, and how many turns there are; empty for a finished case."""
    reason = case.error or case.unfinished
    if not reason or not case.variants:
        return ""
    counts = ", ".join(f"{variant.name} {variant.turns}" for variant in case.variants)
    of = f" of {case.planned_turns} each" if case.planned_turns else ""
    return f"{case.workload}, unfinished, {reason.rstrip('.')}. Turns measured{of}: {counts}."


def recommended(case: CaseResult) -> str:
    """How the recommended variant did among those that compute the same; empty without one."""
    chosen = next((v for v in case.measured if v.recommended), None)
    if chosen is None:
        return ""
    changed = _with_verdict(case.variants, "changes the result")
    rivals = [chosen, *(v for v in case.measured if v not in changed and not v.ceiling)]
    times = {v.name: v.times for v in rivals if v.times}
    best = min(times, key=lambda name: times[name].median_ms)
    begin = f"{case.workload}: {chosen.name}, recommended for this device (*),"
    if best == chosen.name:
        return f"{begin} is the fastest."
    slower = compare(times[best], times[chosen.name]).verdict == "slower"
    return f"{begin} is slower than {best}." if slower else f"{begin} is as fast as {best}, the fastest, within noise."


def reached(case: CaseResult) -> str:
    """Share of the ceiling's speed that each variant reaches; empty without a ceiling."""
    listed = ", ".join(f"{v.name} {_of_ceiling(v)}" for v in case.variants if _of_ceiling(v))
    several = sum(v.ceiling for v in case.measured) > 1
    what = f"of the speed of {case.limit}, the lower ceiling" if several else "of the ceiling's speed"
    return f"{case.workload}, {what}: {listed}." if listed else ""


def throttled(case: CaseResult) -> str:
    """Which variants ran while something held the GPU's clocks back; empty for none."""
    held = [f"{v.name} ({', '.join(_throttle_reasons(v))})" for v in case.variants if _throttle_reasons(v)]
    return f"{case.workload}, throttled (!): {', '.join(held)}." if held else ""


def _efficiency(case: CaseResult) -> str:
    """Share of a matrix product's rate that each variant reaches, and its energy; empty if neither is known."""
    tflops = case.ceilings.matmul_tflops if case.ceilings else {}
    product = ", ".join(f"{number(rate)} TFLOP/s in {dtype}" for dtype, rate in tflops.items())
    shares = ", ".join(f"{v.name} {_mfu(v)} %" for v in case.variants if _mfu(v))
    spent = ", ".join(f"{v.name} {_joules(v)}" for v in case.variants if _joules(v))
    used = f"{case.workload}, of a matrix product's rate ({product}): {shares}." if shares else ""
    return " ".join(filter(None, (used, f"Joules per 1,000 examples: {spent}." if spent else "")))


def _sent(case: CaseResult) -> str:
    """What the replicas send each other, how soon they train, and what is predicted; empty for one replica."""
    found = case.communication
    if found is None:
        return ""
    sent, expected = found.sent_bytes_per_step, number(found.expected_bytes_per_step / 2**20)
    measured = f"{case.workload}: each of the {found.replicas} replicas sends "
    measured += (
        f"{expected} MiB per step by the model's size" if sent is None else f"{number(sent / 2**20)} MiB per step"
    )
    by_size = "" if sent is None else f", {expected} MiB by the model's size"
    begun = ", ".join(f"{name} {number(value)} s" for name, value in found.start_to_first_step_seconds.items())
    started = f" From the start to the end of the first step: {begun}." if begun else ""
    predicted = ", ".join(
        f"{each.replicas} replicas {number(each.step_ms)} ms per step ({each.efficiency:.0%} of linear scaling)"
        for each in found.predictions
    )
    return f"{measured}{by_size}.{started} Predicted, not measured: {predicted}."


def change(found: Change) -> str:
    """How a variant did in a second run, as a line."""
    speed = f" {ratio(found.comparison.ratio, found.comparison.interval)}," if found.comparison else ""
    return f"{found.suite} on {found.workload}, {found.variant}:{speed} {found.finding}"


def _throttle_reasons(variant: VariantResult) -> Sequence[str]:
    return variant.conditions.throttle_reasons if variant.conditions else ()
