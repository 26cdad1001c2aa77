"""A run as a table in a terminal and as a self-contained HTML page."""

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from tfopt.bench.report import formatting
from tfopt.bench.report.formatting import bars, number
from tfopt.bench.results import FORMULA, CaseResult, Run
from tfopt.measure import StepTimes
from tfopt.page import Page, Section, Table, bar_chart, entries, render

WIDTH = 120
"""Columns, whatever the terminal, so that a file or a README always gets the same table."""

_TITLE, _TITLE_BESIDE_MEMORY = 36, 28
_LEGEND = (
    "Times are medians with a 95 % interval. Speed is the baseline's time over the variant's, turn by turn, and the "
    "median of these. Result says what the variant computes, compared with the baseline."
)


def terminal(run: Run) -> str:
    """Returns the table and the sentences around it, as plain text."""
    console = Console(width=WIDTH, color_system=None, force_terminal=False, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(f"tfopt-bench on {formatting.device(run)}")
        console.print(_terminal_table(run))
        console.print(formatting.lead(run))
        for case in run.cases:
            for sentence in formatting.sentences(case):
                console.print(sentence)
        console.print(
            "ms a step: median [95 % interval]. Speed: the baseline's time over the variant's, turn by turn. "
            f"Status: {run.status}."
        )
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _terminal_table(run: Run) -> TerminalTable:
    with_memory = any(variant.peak_memory_mib is not None for case in run.cases for variant in case.variants)
    table = TerminalTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=with_memory)
    table.add_column("Variant", no_wrap=True)
    table.add_column("ms a step", justify="right")
    table.add_column("Speed", justify="right")
    if with_memory:
        table.add_column("Peak\nMiB", justify="right")
    table.add_column("Result")
    table.add_column("Verdict")
    longest = _TITLE_BESIDE_MEMORY if with_memory else _TITLE
    for position, case in enumerate(run.cases):
        if position:
            table.add_row()
        title, unit = f"{case.suite}, {case.workload}:", case.unit
        # No row spans columns: a long title would take their width.
        table.add_row(Text(f"{title} {unit}" if len(title) + len(unit) < longest else f"{title}\n{unit}"))
        for state, reason in (("failed", case.error), ("unfinished", case.unfinished)):
            if reason:
                table.add_row(f"  {state}", "", "", *[""] * with_memory, "", Text(reason))
        for variant in case.variants:
            memory = [formatting.memory(variant)] * with_memory
            cells = (formatting.step_time(variant), formatting.speed(variant), *memory, formatting.check(variant))
            table.add_row(*map(Text, (f"  {formatting.name(variant)}", *cells, formatting.verdict(variant))))
    return table


def page(run: Run) -> str:
    """Returns the HTML page.

    Raises:
        tfopt.errors.UnsupportedError: If jinja2 is not installed.
    """
    status = "" if run.status == "complete" else f"\n\nThis run was cut short: {run.status}."
    rows = entries(run.environment)
    environment = Section(title="Environment", tables=(Table(("What", "Value"), rows, align="ll"),))
    return render(
        Page(
            title="tfopt-bench",
            lead=f"{formatting.lead(run)}{status}\n\nMeasured on {formatting.device(run)}. {_LEGEND}",
            sections=[*map(section, run.cases), environment],
            footer=f"Written by tfopt {run.environment['tfopt']}, run of {run.started}.",
        )
    )


def section(case: CaseResult) -> Section:
    """Returns a case's part of the page."""
    title = f"{case.suite}: {case.workload}"
    failed = f"This case failed: {case.error}" if case.error else ""
    if not case.measured:
        state = failed or (f"This case is unfinished: {case.unfinished}." if case.unfinished else "")
        refused = [f"{v.name}: {formatting.verdict(v)}" for v in case.variants]
        return Section(title=title, text="\n\n".join(filter(None, (case.question, state, *refused))))
    notes = "; ".join(f"{variant.name}: {variant.note}" for variant in case.variants)
    said = (formatting.unfinished(case), formatting.recommended(case), formatting.throttled(case))
    return Section(
        title=title,
        text=" ".join(filter(None, (case.question, f"{notes}.", *said))),
        charts=tuple(_charts(case)),
        tables=(formatting.table(case), *_rates(case), *_communication(case)),
        details=tuple((f"Raw samples of {v.name}", _samples(v.times)) for v in case.measured if v.times),
    )


def _charts(case: CaseResult) -> Iterator[str]:
    if drawn := bars(case):
        yield bar_chart(
            drawn,
            title=f"Speed of a {case.unit}",
            description=f"Times as fast as {case.baseline}, with the interval; longer is faster.",
            reference=1.0,
            reference_label=f"as fast as {case.baseline}",
        )
    # What draws the others loads TensorFlow.
    if case.profile:
        from tfopt.pipelines.profiling.pipeline_profile import chart_of as chart_of_profile

        yield chart_of_profile(case.profile)
    for gate in case.gate or ():
        from tfopt.precision.gate.precision_report import chart_of as chart_of_gate

        yield chart_of_gate(gate)


def _rates(case: CaseResult) -> Iterator[Table]:
    rates = case.ceilings
    if rates is None:
        return
    rows = [(f"Matrix product, {dtype}", f"{number(value)} TFLOP/s") for dtype, value in rates.matmul_tflops.items()]
    rows.append(("Copy on the device, read and written", f"{number(rates.copy_gib_per_second)} GiB/s"))
    if rates.host_to_device_gib_per_second is not None:
        rows.append(("Host to device, pageable memory", f"{number(rates.host_to_device_gib_per_second)} GiB/s"))
    yield Table(("What this device reaches", "Rate"), rows, align="lr")


def _communication(case: CaseResult) -> Iterator[Table]:
    found = case.communication
    if found is None:
        return
    sent = found.sent_bytes_per_step
    yield Table(
        ("Communication", "Value"),
        [
            ("Bytes each replica sends per step", "not measured" if sent is None else f"{sent:,.0f}"),
            ("The same by the model's size, 2 (n - 1) / n · bytes", f"{found.expected_bytes_per_step:,.0f}"),
            ("Latency of a message", f"{number(found.model.latency_ms)} ms"),
            ("Bandwidth from a replica to the next", f"{number(found.model.mib_per_second)} MiB/s"),
            *[
                (f"Start to first step, {name}", f"{number(seconds)} s")
                for name, seconds in found.start_to_first_step_seconds.items()
            ],
            *_sharding(found.sharding),
        ],
        align="lr",
    )
    yield Table(
        (f"Predicted, not measured: {FORMULA}", "ms a step", "Of linear scaling"),
        [(f"{each.replicas} replicas", number(each.step_ms), f"{each.efficiency:.0%}") for each in found.predictions],
        align="lrr",
    )


def _sharding(found: Mapping[str, float] | None) -> Iterator[tuple[str, str]]:
    if found:
        yield "Bytes of optimizer state on each replica", f"{found['unsharded_state_bytes']:,.0f}"
        yield "The same with shard_optimizer", f"{found['state_bytes']:,.0f}"
        if measured := found.get("measured_sent_bytes"):
            yield "Bytes each replica sends per step with shard_optimizer", f"{measured:,.0f}"


def _samples(times: StepTimes) -> Table:
    rows = [(str(turn), " ".join(map(number, repeat))) for turn, repeat in enumerate(times.repeats_ms, 1)]
    steps = times.steps_per_sample
    return Table(("Turn", f"ms a step, each the mean of {steps} step{'s' * (steps > 1)}"), rows, align="rl")
