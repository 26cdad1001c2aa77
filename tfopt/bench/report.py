"""The results as a self-contained HTML page."""

from collections.abc import Iterator
from typing import Any

from tfopt.bench import words
from tfopt.bench.columns import bars, table
from tfopt.bench.scaling import FORMULA
from tfopt.page import Page, Section, Table, bar_chart, entries, render

_LEGEND = (
    "Times are medians with a 95 % interval. Speed is the baseline's time over the variant's, turn by turn, and the "
    "median of these. Result says what the variant computes, compared with the baseline."
)


def page(document: dict[str, Any]) -> str:
    """The page, as HTML.

    Args:
        document: A results document.

    Raises:
        tfopt.errors.UnsupportedError: jinja2 is not installed.
    """
    sections = [section(case) for case in document["cases"]]
    status = "" if document["status"] == "complete" else f"\n\nThis run was cut short: {document['status']}."
    return render(
        Page(
            title="tfopt-bench",
            lead=f"{words.lead(document)}{status}\n\nMeasured on {words.device(document)}. {_LEGEND}",
            sections=[*sections, _environment(document)],
            footer=f"Written by tfopt {document['environment']['tfopt']}, run of {document['started']}.",
        )
    )


def section(case: dict[str, Any]) -> Section:
    """A case's part of the page."""
    title = f"{case['suite']}: {case['workload']}"
    if case["error"]:
        return Section(title=title, text=f"{case['question']}\n\nThis case failed: {case['error']}")
    notes = "; ".join(f"{variant['name']}: {variant['note']}" for variant in case["variants"])
    said = (words.recommended(case), words.throttled(case))
    return Section(
        title=title,
        text=" ".join(filter(None, (case["question"], f"{notes}.", *said))),
        charts=(_chart(case), *_more_charts(case)),
        tables=(table(case), *_rates(case), *_communication(case)),
        details=tuple((f"Raw samples of {variant['name']}", _samples(variant)) for variant in case["variants"]),
    )


def _rates(case: dict[str, Any]) -> Iterator[Table]:
    rates = case.get("ceilings")
    if not rates:
        return
    rows = [(f"Matrix product, {dtype}", f"{words.number(v)} TFLOP/s") for dtype, v in rates["matmul_tflops"].items()]
    rows.append(("Copy on the device, read and written", f"{words.number(rates['copy_gib_per_second'])} GiB/s"))
    if rates["host_to_device_gib_per_second"] is not None:
        speed = words.number(rates["host_to_device_gib_per_second"])
        rows.append(("Host to device, pageable memory", f"{speed} GiB/s"))
    yield Table(("What this device reaches", "Rate"), rows, align="lr")


def _communication(case: dict[str, Any]) -> Iterator[Table]:
    found = case.get("communication")
    if not found:
        return
    model, sent = found["model"], found["sent_bytes_per_step"]
    yield Table(
        ("Communication", "Value"),
        [
            ("Bytes sent a step by each replica", "not measured" if sent is None else f"{sent:,.0f}"),
            ("The same by the model's size, 2 (n - 1) / n · bytes", f"{found['expected_bytes_per_step']:,.0f}"),
            ("Latency of a message", f"{words.number(model['latency_ms'])} ms"),
            ("Bandwidth from a replica to the next", f"{words.number(model['mib_per_second'])} MiB/s"),
            *[
                (f"Start to first step, {name}", f"{words.number(s)} s")
                for name, s in found["start_to_first_step_seconds"].items()
            ],
        ],
        align="lr",
    )
    yield Table(
        (f"Predicted, not measured: {FORMULA}", "ms a step", "Of linear scaling"),
        [
            (f"{each['replicas']} replicas", words.number(each["step_ms"]), f"{each['efficiency']:.0%}")
            for each in found["predictions"]
        ],
        align="lrr",
    )


def _more_charts(case: dict[str, Any]) -> Iterator[str]:
    # What draws them loads TensorFlow.
    if profile := case.get("profile"):
        from tfopt.pipelines.profiling.pipeline_profile import chart_of as chart_of_profile

        yield chart_of_profile(profile)
    for gate in case.get("gate") or ():
        from tfopt.precision.gate.precision_report import chart_of as chart_of_gate

        yield chart_of_gate(gate)


def _chart(case: dict[str, Any]) -> str:
    return bar_chart(
        bars(case),
        title=f"Speed of a {case['unit']}",
        description=f"Times as fast as {case['baseline']}, with the interval; longer is faster.",
        reference=1.0,
        reference_label=f"as fast as {case['baseline']}",
    )


def _samples(variant: dict[str, Any]) -> Table:
    rows = [
        (str(turn), " ".join(words.number(sample) for sample in repeat))
        for turn, repeat in enumerate(variant["step_time"]["repeats_ms"], start=1)
    ]
    steps = variant["step_time"]["steps_per_sample"]
    return Table(("Turn", f"ms a step, each the mean of {steps} step{'s' * (steps > 1)}"), rows, align="rl")


def _environment(document: dict[str, Any]) -> Section:
    rows = entries(document["environment"])
    return Section(title="Environment", tables=(Table(("What", "Value"), rows, align="ll"),))
