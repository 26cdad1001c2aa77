"""A run's figures as text: cells of a table, bars of a chart, and the sentences beside them."""

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tfopt.bench.results import NEVER_BEGAN, CaseResult, Run, VariantResult
from tfopt.bench.results.changes import Change
from tfopt.measure import compare
from tfopt.page import Bar, Table
from tfopt.text import described, percent, wrapped

BUSY_PERCENT = 10.0
"""Of the CPUs: more than this, taken by other programs, explains noisy figures."""

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


def ratio(value: float, interval: Sequence[float] | None) -> str:
    """A ratio with its interval, if it has one."""
    if interval is None:
        return f"{number(value)}×"
    return f"{number(value)}× [{number(interval[0])}–{number(interval[1])}]"


def name(variant: VariantResult) -> str:
    """Name, with a star if tfopt recommends the variant for the device, and a mark if it was throttled."""
    return f"{variant.name}{' *' * variant.recommended}{' !' * bool(_throttle_reasons(variant))}"


def step_time(variant: VariantResult) -> str:
    """Milliseconds per step, with the interval."""
    if variant.times is None or variant.metrics is None:
        return ""
    if variant.metrics.interval_ms is None:
        return median(variant)
    low, high = variant.metrics.interval_ms
    return f"{number(variant.times.median_ms)} [{number(low)}–{number(high)}]"


def median(variant: VariantResult) -> str:
    """Milliseconds per step."""
    return number(variant.times.median_ms) if variant.times and variant.metrics else ""


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
        return re.sub(r"(?<=\d)%", " %", variant.check.text)  # as runs recorded before have it
    return "not checked" if variant.times else ""


def verdict(variant: VariantResult) -> str:
    """What to make of the variant."""
    if variant.refused:
        turns = f" after {variant.turns} turn{'s' * (variant.turns > 1)}" if variant.turns else ""
        return f"refused{turns}: {variant.refused}"
    if variant.verdict == "faster" and variant.ceiling:
        return "the ceiling"
    short = {"too noisy to tell": "too noisy", "too few repeats to tell": "too few turns"}
    return short.get(variant.verdict or "", variant.verdict) or "not measured"


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
    _Column("Verdict", "l", verdict),
    _Column("Speed", "r", speed),
    _Column("ms a step", "r", step_time),
    _Column("Of the ceiling", "r", _of_ceiling, always=False),
    _Column("MFU %", "r", _mfu, always=False),
    _Column("J / 1,000", "r", _joules, always=False),
    _Column("First step", "r", _first_step),
    _Column("Peak MiB", "r", memory, always=False),
    _Column("GPU", "l", _conditions, always=False),
    _Column("Result", "l", check),
)


_MEANINGS = {
    "Of the ceiling": "Of the ceiling is the variant's speed over that of the ceiling, such as the step alone.",
    "MFU %": "MFU, model FLOPs utilisation, is the model's operations over those of a large matrix product in the same "
    "time.",
    "J / 1,000": "J / 1,000 is the energy in joules for 1,000 examples.",
}


def table(case: CaseResult) -> Table:
    """A row for each variant; columns without a known value are left out."""
    columns = [column for column in _COLUMNS if column.always or any(map(column.cell, case.variants))]
    rows = [[column.cell(variant) for column in columns] for variant in case.variants]
    return Table([column.header for column in columns], rows, align="".join(column.align for column in columns))


def legend(cases: Sequence[CaseResult]) -> str:
    """What the columns mean that only some runs have."""
    shown = {header for case in cases for header in table(case).headers}
    return " ".join(meaning for header, meaning in _MEANINGS.items() if header in shown)


def unbroken(page: str) -> str:
    """Returns a page on which no line ends between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|s|MHz|W|°C|[KMG]iB(?:/s)?|TFLOP/s)(?![\w/]))", "\N{NO-BREAK SPACE}", page)


def bars(case: CaseResult) -> list[Bar]:
    """A bar for each measured variant, as long as it is fast."""
    found = []
    for variant in case.measured:
        metrics = variant.metrics
        if metrics is None or metrics.verdict == "not compared":
            continue
        comparison = metrics.comparison
        low, high = (comparison and comparison.interval) or (None, None)
        found.append(
            Bar(
                label=variant.name,
                value=comparison.ratio if comparison else 1.0,
                text=speed(variant),
                low=low,
                high=high,
                tone="plain" if variant.ceiling else _TONES.get(metrics.verdict, "unclear"),
                meaning="the ceiling" if variant.ceiling else metrics.verdict,
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
    """What the run found, technique by technique, in a few sentences."""
    measured = [variant for case in run.cases for variant in case.measured]
    end = "".join(f" {sentence}" for sentence in _shortcomings(run))
    if not measured:
        return f"Nothing was measured.{end}"
    steps = [variant for case in run.cases if case.suite != "stack" and not _is_part(case) for variant in case.measured]
    parts = [variant for case in run.cases if _is_part(case) for variant in case.measured]
    if not steps and not parts:  # only `stack` ran
        steps = measured
    helped, of_input = _helped(steps), _helped(parts)
    hurt = "; ".join(v.name for v in _with_verdict([*steps, *parts], "slower"))
    wrong = "; ".join(v.name for v in _with_verdict(measured, "changes the result"))
    found = [
        f"Faster than its baseline here: {helped}." if helped else "Nothing was faster than its baseline here.",
        f"Faster input, without training: {of_input}." if of_input else "",
        f"Slower: {hurt}." if hurt else "",
        f"Changes the result: {wrong}." if wrong else "",
    ]
    return " ".join(filter(None, found)) + end


def _is_part(case: CaseResult) -> bool:
    """Whether a case measures the input without training, whose gain says little about training."""
    return case.unit.startswith("batch")


def _helped(variants: Sequence[VariantResult]) -> str:
    helped = [(v.name, _ratio(v)) for v in _with_verdict(variants, "faster") if not v.ceiling]
    return "; ".join(f"{name} {number(gain)}×" for name, gain in sorted(helped, key=lambda pair: -pair[1]))


def load(run: Run) -> str:
    """How busy the machine was with other things, which variants are too noisy for it, and how to re-measure them."""
    shares = [case.others_cpu_percent for case in run.cases if case.others_cpu_percent is not None]
    busy = max(shares, default=0.0)
    noisy = [v for case in run.cases for v in _with_verdict(case.variants, "too noisy to tell")]
    said = []
    if round(busy):
        said.append(
            f"Other programs took {statistics.median(shares):.0f} % of the CPUs, at most {busy:.0f} % in a case."
        )
    if noisy:
        said.append(f"{len(noisy)} variant{'s are' if len(noisy) > 1 else ' is'} too noisy to tell.")
        suites = " ".join(dict.fromkeys(c.suite for c in run.cases if _with_verdict(c.variants, "too noisy to tell")))
        quiet = (
            "Close other programs"
            if busy > BUSY_PERCENT
            else "Fix the CPU's frequency, if you can (pyperf system tune)"
        )
        said.append(f"{quiet}, then re-measure: tfopt-bench run {suites}")
    return " ".join(said)


def _shortcomings(run: Run) -> list[str]:
    """What failed, is missing, or is not as it seems."""
    failed = [" on ".join(case.address) for case in run.cases if case.error]
    cut = [" on ".join(case.address) for case in run.cases if case.unfinished and case.variants]
    never = [" on ".join(case.address) for case in run.cases if case.unfinished == NEVER_BEGAN]
    refused = [f"{v.name} ({' on '.join(case.address)})" for case in run.cases for v in case.variants if v.refused]
    found = [
        f"Failed: {'; '.join(failed)}." if failed else "",
        f"Unfinished: {'; '.join(cut)}." if cut else "",
        f"Never began: {'; '.join(never)}." if never else "",
        f"Refused on this machine: {'; '.join(refused)}." if refused else "",
        "Run at CPU sizes: the results say nothing about a GPU." if run.small else "",
        f"Changed before the run was resumed: {'; '.join(run.resumed)}." if run.resumed else "",
    ]
    return list(filter(None, found))


def _with_verdict(variants: Sequence[VariantResult], stated: str) -> list[VariantResult]:
    return [v for v in variants if v.verdict == stated]


def _ratio(variant: VariantResult) -> float:
    return variant.metrics.comparison.ratio if variant.metrics and variant.metrics.comparison else 0.0


def sentences(case: CaseResult) -> list[str]:
    """What there is to say about a case beside its table."""
    found = (*remarks(case), reached(case), _efficiency(case), _sent(case))
    return [sentence for sentence in found if sentence]


def remarks(case: CaseResult) -> list[str]:
    """What a reader of its table must know."""
    found = (unfinished(case), recommended(case), throttled(case))
    return [sentence for sentence in found if sentence]


def unfinished(case: CaseResult) -> str:
    """Why turns or checks of a case are missing, and how many turns there are; empty for a finished case."""
    reason = case.error or case.unfinished
    if not reason or not case.variants:
        return ""
    if case.planned_turns and all(v.refused or v.turns >= case.planned_turns for v in case.variants):
        return f"{case.workload}, unfinished, {reason.rstrip('.')}. All turns were measured; the check is missing."
    counts = ", ".join(f"{variant.name} {variant.turns}" for variant in case.variants)
    of = f" of {case.planned_turns} each" if case.planned_turns else ""
    return f"{case.workload}, unfinished, {reason.rstrip('.')}. Turns measured{of}: {counts}."


def recommended(case: CaseResult) -> str:
    """How the recommended variant did among those that compute the same; empty without one."""
    chosen = next((v for v in case.measured if v.recommended), None)
    if chosen is None:
        return ""
    begin = f"{case.workload}: the recommended variant (*, {chosen.name})"
    if case.unfinished and chosen.check is None:
        return f"{begin} is not judged: its result was not checked."
    changed = _with_verdict(case.variants, "changes the result")
    rivals = [chosen, *(v for v in case.measured if v not in changed and not v.ceiling)]
    times = {v.name: v.times for v in rivals if v.times}
    best = min(times, key=lambda name: times[name].median_ms)
    found = {name: compare(one, times[chosen.name]) for name, one in times.items() if name != chosen.name}
    if any(one.interval is None for one in found.values()):
        return f"{begin} is not judged after so few turns."
    if best == chosen.name:
        clearly = all(one.verdict == "faster" for one in found.values())
        return f"{begin} is the fastest{'' if clearly else ', within noise'}."
    slower = found[best].verdict == "slower"
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
        f"{each.replicas} replicas {number(each.step_ms)} ms per step ({percent(each.efficiency)} of linear scaling)"
        for each in found.predictions
    )
    return f"{measured}{by_size}.{started} Predicted, not measured: {predicted}."


def changes(found: Sequence[Change], width: int) -> str:
    """How the variants of a run did in a second one: what is compared, lines for each, and what follows."""
    failed = [change for change in found if change.failed]
    missing = [change for change in found if change.missing]
    compared = [change for change in found if not change.missing]
    lines = ["Each variant's speed relative to its baseline, second run over first:"]
    for change in compared:
        gain = change.comparison
        speed = ratio(gain.ratio, gain.interval) if gain else "–"
        lines.append(f"{change.suite}, {change.workload}, {change.variant}")
        lines += described([(f"{speed:<20}", change.finding)], width)
    lines += _missing(missing, compared)
    of = f"of {len(compared)} compared variant{'s' * (len(compared) != 1)} regressed"
    lines.append(f"{len(failed)} {of} or changed:" if failed else f"None {of}.")
    lines += [f"- {change.suite}, {change.workload}: {change.variant}" for change in failed]
    return wrapped("\n".join(lines), width)


def _missing(missing: Sequence[Change], compared: Sequence[Change]) -> list[str]:
    """What the second run has not measured; suites that it lacks are not listed variant by variant."""
    has = list(dict.fromkeys(change.suite for change in compared))
    lines = []
    if any(change.suite not in has for change in missing):
        only = f"the suite {has[0]}" if len(has) == 1 else f"the suites {' and '.join(has)}"
        lines.append(f"The second run has only {only}; variants of other suites were not compared.")
    rest = [change for change in missing if change.suite in has]
    lines += ["Missing in the second run, and not compared:"] * bool(rest)
    return lines + [f"- {change.suite}, {change.workload}: {change.variant} ({change.finding})" for change in rest]


def _throttle_reasons(variant: VariantResult) -> Sequence[str]:
    return variant.conditions.throttle_reasons if variant.conditions else ()
