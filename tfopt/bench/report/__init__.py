"""A run as a table in a terminal and as a self-contained HTML page."""

import textwrap
from collections.abc import Iterator, Mapping

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text

from tfopt.bench.report import formatting
from tfopt.bench.report.advice import advise
from tfopt.bench.report.formatting import bars, number
from tfopt.bench.results import FORMULA, NEVER_BEGAN, CaseResult, Run
from tfopt.measure import StepTimes
from tfopt.page import Page, Section, Table, bar_chart, entries, render
from tfopt.text import WIDTH, percent, wrapped

_LEGEND = (
    "Times are medians with a 95 % interval. Speed is the baseline's time over the variant's, turn by turn, and the "
    "median of these. Result says what the variant computes, compared with the baseline."
)


def terminal(run: Run) -> str:
    """Returns the table and the sentences around it, as plain text that ends in what to do."""
    # Whatever the terminal, so that the table fits any, a file and a README.
    console = Console(width=WIDTH, color_system=None, force_terminal=False, highlight=False, markup=False)
    with console.capture() as capture:
        for part in _terminal_tables(run):
            console.print(part)
    tables = "\n".join(line.rstrip() for line in capture.get().splitlines())
    title = f"tfopt-bench on {formatting.device(run)}, {_when(run)}"
    return "\n".join([wrapped(title), tables, *map(wrapped, _sentences(run))])


def _sentences(run: Run) -> Iterator[str]:
    """What stands below the tables."""
    yield "ms: median of a step. Speed: the baseline's time over it, turn by turn [95 %]."
    yield formatting.lead(run)
    for case in run.cases:
        yield from formatting.remarks(case)
    yield formatting.load(run)
    if run.status != "complete":
        yield f"This run was cut short: {run.status}."
    if not any(case.suite == "stack" for case in run.cases):
        yield "To get a recommendation for this machine, run: tfopt-bench run stack"
    for found in advise(run):
        yield f"\nDo this: {found.summary}"
        if found.code:
            yield from ("", textwrap.indent(found.code, "    "), "")
        if found.notes:
            yield found.notes


def _when(run: Run) -> str:
    return run.started[:16].replace("T", " ")


def _terminal_tables(run: Run) -> Iterator[RenderableType]:
    """A table with the headers, then a title and a table for each case, since no row of a table can be a title."""
    with_memory = any(variant.peak_memory_mib is not None for case in run.cases for variant in case.variants)
    header = _terminal_table(with_memory)
    header.show_header = True
    yield Padding(header, (1, 0, 0, 2))
    for case in run.cases:
        if case.unfinished == NEVER_BEGAN:  # the sentences below list it
            continue
        yield Text(f"{case.suite}, {case.workload}")
        table = _terminal_table(with_memory)
        for variant in case.variants:
            memory = [formatting.memory(variant)] * with_memory
            cells = (formatting.median(variant), formatting.speed(variant), *memory, formatting.check(variant))
            verdict = "refused" if variant.refused else formatting.verdict(variant)
            table.add_row(*map(Text, (formatting.name(variant), *cells, verdict)))
        yield Padding(table, (0, 0, 0, 2))
        # Reasons are longer than a cell.
        reasons = [(v.name, formatting.verdict(v)) for v in case.variants if v.refused]
        for what, reason in (*reasons, ("failed", case.error), ("unfinished", case.unfinished)):
            if reason:
                yield Padding(Text(f"{what}: {reason}"), (0, 0, 0, 2))
        yield ""


def _terminal_table(with_memory: bool) -> TerminalTable:
    table = TerminalTable(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Variant", width=16 if with_memory else 21)
    table.add_column("ms", width=6, justify="right", no_wrap=True)
    table.add_column("Speed", width=20, justify="right", no_wrap=True)
    if with_memory:
        table.add_column("MiB", width=6, justify="right", no_wrap=True)
    table.add_column("Result", width=14)
    table.add_column("Verdict", width=11 if with_memory else 13)
    return table


def page(run: Run) -> str:
    """Returns the HTML page.

    Raises:
        tfopt.errors.UnsupportedError: If jinja2 is not installed.
    """
    status = "" if run.status == "complete" else f"This run was cut short: {run.status}."
    measured = f"Measured on {formatting.device(run)}, {_when(run)}. {formatting.load(run)}"
    rows = entries(run.environment)
    environment = Section(title="Environment", tables=(Table(("What", "Value"), rows, align="ll"),))
    legend = " ".join(filter(None, (_LEGEND, formatting.legend(run.cases))))
    found = advise(run)
    document = render(
        Page(
            title="tfopt-bench",
            lead="\n\n".join(filter(None, (*(each.summary for each in found), measured, status))),
            sections=[
                *(
                    Section(title=f"Do this: {each.workload}", code=each.code, text=each.notes)
                    for each in found
                    if each.code
                ),
                Section(title="What was found", text=f"{formatting.lead(run)}\n\n{legend}"),
                *map(section, run.cases),
                environment,
            ],
            footer=f"Written by tfopt {run.environment['tfopt']}, run of {run.started}.",
        )
    )
    return formatting.unbroken(document)


def section(case: CaseResult) -> Section:
    """Returns a case's part of the page."""
    title = f"{case.suite}: {case.workload}"
    failed = f"This case failed: {case.error}" if case.error else ""
    if not case.measured:
        state = failed or (f"This case is unfinished: {case.unfinished}." if case.unfinished else "")
        refused = [f"{v.name}: {formatting.verdict(v)}" for v in case.variants]
        return Section(title=title, text="\n\n".join(filter(None, (case.question, state, *refused))))
    notes = Table(("Variant", "What it is"), [(variant.name, variant.note) for variant in case.variants])
    said = (formatting.unfinished(case), formatting.recommended(case), formatting.throttled(case))
    return Section(
        title=title,
        text="\n\n".join(filter(None, (case.question, *said))),
        charts=tuple(_charts(case)),
        tables=(formatting.table(case), notes, *_rates(case), *_communication(case)),
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
    if case.profile:
        from tfopt.pipelines.profiling.pipeline_profile import chart_of as chart_of_profile

        yield chart_of_profile(case.profile)
    for gate in case.gate or ():
        from tfopt.precision.gate.gate_chart import chart_of as chart_of_gate

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
        [(f"{each.replicas} replicas", number(each.step_ms), percent(each.efficiency)) for each in found.predictions],
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
