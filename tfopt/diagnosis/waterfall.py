"""A diagnosis as text and as an HTML page: a waterfall from a step as it stands down to the computation."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tfopt.causes.catalogue import WORTH_SHARE
from tfopt.diagnosis.findings import CauseCost, Diagnosis
from tfopt.measure import StepTimes
from tfopt.page import Bar, Page, Section, Table, bar_chart, entries, render
from tfopt.text import WIDTH, aligned, figure, percent

# Columns for the longest bar, however long the names are.
_NARROWEST = 12


def bars(diagnosis: Diagnosis) -> list[Bar]:
    """Returns the waterfall: a step now, each cause that counts, what they leave unexplained, and the computation.

    The first and the last begin at 0. The others begin where the one before ended, and run to the left: they are costs.
    """
    now, floor, now_ms = diagnosis.now, diagnosis.floor, diagnosis.now.median_ms
    rate = " a step" if now.examples_per_second is None else f" ({figure(now.examples_per_second)} examples/s)"
    drawn = [Bar("now", now_ms, _ms(now_ms) + rate, *now.spread_ms, "baseline", "a step now")]
    at_ms = now_ms
    for cause in diagnosis.worth_changing:
        low, high = cause.interval_ms
        label = f"{_ms(cause.cost_ms)} ({_between(low, high)}), {_percent(cause.share)}"
        drawn.append(Bar(cause.name, -cause.cost_ms, label, -high, -low, "worse", "worth changing", at_ms))
        at_ms -= cause.cost_ms
    rest_ms = diagnosis.unexplained_ms
    if abs(rest_ms) > WORTH_SHARE * now_ms:
        name = "causes overlap" if rest_ms < 0 and len(diagnosis.worth_changing) > 1 else "not explained"
        label = f"{_ms(rest_ms)}, {_percent(rest_ms / now_ms)}"
        drawn.append(Bar(name, -rest_ms, label, tone="unclear", meaning=name, start=at_ms))
    low, high = floor.spread_ms
    label = f"{_ms(floor.median_ms)} ({_between(low, high)}), {_percent(floor.median_ms / now_ms)}"
    return [*drawn, Bar("the computation", floor.median_ms, label, low, high, "better", "the computation")]


def text(diagnosis: Diagnosis) -> str:
    """Returns the verdict, the waterfall, what to do about each cause, and what else was or was not tested.

    Only lines of code may be longer than 80 columns.
    """
    others = [f"{name}: {', '.join(listed)}." for name, listed in _others(diagnosis) if listed]
    parts = [
        _wrapped(diagnosis.verdict),
        _drawn(bars(diagnosis)),
        *map(_block, diagnosis.worth_changing),
        _wrapped(_together(diagnosis)),
        *(_wrapped(f"Noticed: {each.evidence} {each.remedy}") for each in diagnosis.noticed),
        "\n".join(map(_wrapped, others)),
        _wrapped(diagnosis.computation),
    ]
    return "\n\n".join(filter(None, parts))


def _drawn(rows: Sequence[Bar]) -> str:
    """The bars as lines of text."""
    names = [" ".join(row.label.split()) for row in rows]
    room = WIDTH - len("  name  bar  text") + len("namebartext") - max(len(row.text) for row in rows)
    longest = min(max(map(len, names)), room - _NARROWEST)
    cells = room - longest
    low, high = (edge(row.start + end for row in rows for end in (0.0, row.value)) for edge in (min, max))
    lines = []
    for row, name in zip(rows, names, strict=True):
        left, right = sorted(round(cells * (end - low) / (high - low)) for end in (row.start, row.start + row.value))
        bar = " " * min(left, cells - 1) + "█" * max(right - left, 1)
        lines.append((name if len(name) <= longest else f"{name[: longest - 1]}…", bar, row.text))
    return "\n".join(aligned(lines, texts=3))


def _block(cause: CauseCost) -> str:
    """A cause, what was measured, and what to do."""
    what = "\n".join([_wrapped(f"{cause.name}, {_ms(cause.cost_ms)} a step"), _wrapped(cause.evidence, indent="  ")])
    remedy = textwrap.indent(cause.remedy.strip("\n"), "    ")
    return "\n\n".join(filter(None, [what, remedy, _wrapped(_predicted(cause), indent="  ")]))


def _others(diagnosis: Diagnosis) -> list[tuple[str, list[str]]]:
    """The causes that do not count and those not tested, in a few words each."""
    rest = [cause for cause in diagnosis.causes if not cause.counts]
    return [
        (
            "Tested and not worth changing",
            [_without(cause) for cause in rest if cause not in diagnosis.too_noisy],
        ),
        (
            "Too noisy to tell",
            [f"{cause.name} {_ms(cause.cost_ms)} ({_between(*cause.interval_ms)})" for cause in diagnosis.too_noisy],
        ),
        ("Not tested", [f"{each.name} ({each.reason.rstrip('.')})" for each in diagnosis.not_tested]),
    ]


def _without(cause: CauseCost) -> str:
    """What a cause that does not count costs, or what the training would be without it."""
    ms = cause.cost_ms
    return f"{cause.name} {_ms(ms)}" if ms >= 0 else f"{cause.name} (changed: {_ms(-ms)} slower)"


def _predicted(cause: CauseCost) -> str:
    """What the remedy gains; empty if that is unknown."""
    if cause.gain is None:
        return ""
    times = f"{figure(cause.gain)} times as fast"
    if cause.at_most:
        return f"At best, if this cost nothing, training would be {times}."
    low, high = cause.gain_interval or (cause.gain, cause.gain)
    between = f"{figure(low)}–{figure(high)}" if math.isfinite(high) else f"{figure(low)} or more"
    return f"With this change, training is predicted to be {times} ({between})."


def _together(diagnosis: Diagnosis) -> str:
    """What all of it gains at once; empty unless several causes count."""
    found = diagnosis.together
    return "" if found is None else f"With all of these removed, a step through fit is {found}."


def page(diagnosis: Diagnosis) -> str:
    """Returns the HTML page.

    Raises:
        tfopt.errors.UnsupportedError: If jinja2 is not installed.
    """
    environment = diagnosis.environment
    recorded = Table(("What", "Value"), entries(environment))
    sections = [
        _picture(diagnosis),
        *map(_remedy, diagnosis.worth_changing),
        *(Section(f"Noticed: {each.name}", f"{each.evidence} {each.remedy}") for each in diagnosis.noticed),
        *([Section("All of these at once", _together(diagnosis))] if diagnosis.together else []),
        _tested(diagnosis),
        Section("The computation", diagnosis.computation),
        Section("Environment", details=[("Everything recorded", recorded)]),
    ]
    return render(
        Page(
            title="Diagnosis of a training run",
            lead=f"{diagnosis.verdict}\n\n{_measured_on(environment, diagnosis.date)}",
            sections=sections,
            footer=f"Written by tfopt {environment.get('tfopt', '')}.",
            figures=_figures(diagnosis),
        )
    )


def _figures(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    rate = diagnosis.now.examples_per_second
    return [
        ("A step now", figure(diagnosis.now.median_ms), "ms"),
        *([] if rate is None else [("Throughput now", figure(rate), "examples/s")]),
        ("The computation alone", figure(diagnosis.floor_ms), "ms a step"),
    ]


def _picture(diagnosis: Diagnosis) -> Section:
    chart = bar_chart(
        bars(diagnosis),
        title="From a step now to the computation",
        description="Milliseconds a step. A cause costs what a step takes less without it, with the 95 % interval.",
    )
    samples = [("now", _samples(diagnosis.now)), ("the computation", _samples(diagnosis.floor))]
    return Section("Where a step goes", charts=[chart], details=[(f"Raw samples: {name}", of) for name, of in samples])


def _remedy(cause: CauseCost) -> Section:
    said = "\n\n".join(filter(None, [cause.evidence, _predicted(cause)]))
    return Section(f"{cause.name}: {_ms(cause.cost_ms)} a step", said, code=cause.remedy)


def _samples(times: StepTimes) -> Table:
    rows = [(str(turn), " ".join(map(figure, repeat))) for turn, repeat in enumerate(times.repeats_ms, 1)]
    steps = times.steps_per_sample
    return Table(("Turn", f"ms a step, each the mean of {steps} step{'s' * (steps > 1)}"), rows, align="rl")


def _tested(diagnosis: Diagnosis) -> Section:
    """Every cause tested, and those not tested."""
    rows = [
        (
            cause.name,
            "yes" if cause.counts else "too noisy to tell" if cause in diagnosis.too_noisy else "no",
            _ms(cause.cost_ms),
            _between(*cause.interval_ms),
            _percent(cause.share),
        )
        for cause in diagnosis.causes
    ]
    headers = ("Cause", "Worth changing", "Costs a step", "95 %", "Of a step")
    tested = [Table(headers, rows, align="llrrr")] if rows else []
    measured = [(cause.name, cause.evidence) for cause in diagnosis.causes]
    details = [("What was measured", Table(("Cause", "Measured"), measured))] if rows else []
    reasons = [(each.name, each.reason) for each in diagnosis.not_tested]
    untested = [Table(("Cause", "Reason"), reasons, caption="Not tested")] if reasons else []
    return Section("What was tested", tables=tested + untested, details=details)


def _measured_on(environment: Mapping[str, Any], date: str) -> str:
    """The device, the versions and the date, in a sentence."""
    gpus = [gpu["name"] for gpu in environment.get("gpus", ())]
    cpu = environment.get("host", {}).get("cpu_model") or "an unknown CPU"
    packages = environment.get("packages", {})
    versions = [f"{name} {packages[name.lower()]}" for name in ("TensorFlow", "Keras") if packages.get(name.lower())]
    device = f"{len(gpus)} × {gpus[0]}" if len(gpus) > 1 else gpus[0] if gpus else f"{cpu}, no GPU"
    return f"Measured on {', '.join([device, *versions])}{f', on {date}' if date else ''}."


def _wrapped(paragraph: str, indent: str = "") -> str:
    """A paragraph in lines of 80 columns, with no number parted from its unit."""
    glued = re.sub(r"(?<=\d) (?=%|ms\b)", "\xa0", " ".join(paragraph.split()))
    filled = textwrap.fill(glued, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return filled.replace("\xa0", " ")


def _ms(value: float) -> str:
    return f"{figure(value)} ms"


def _between(low: float, high: float) -> str:
    return f"{figure(low)}–{figure(high)}" if low >= 0 else f"{figure(low)} to {figure(high)}"


def _percent(share: float) -> str:
    return percent(round(share, 2)).replace("-", "−")
