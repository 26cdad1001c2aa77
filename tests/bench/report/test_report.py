"""The page and the table say what the document says, and nothing else."""

import copy
import html
import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tfopt.bench.report import formatting, page, terminal
from tfopt.bench.results import CaseResult, Metrics, VariantResult
from tfopt.bench.results.run_file import from_json
from tfopt.measure import Comparison, StepTimes, compare
from tfopt.text import WIDTH, percent

VOID = {"meta", "br", "hr", "link", "img", "input", "col"}
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


class Page(HTMLParser):
    """Checks that elements close in order; keeps the text that a reader sees and every SVG."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []
        self.folded = []  # raw samples, in <details>

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            (self.folded if "details" in self.open else self.text).append(data)


def parsed(html):
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def numbers_in(value):
    """Every number in a JSON value, those inside texts included, without the raw samples."""
    if isinstance(value, dict):
        return [n for key, v in value.items() if key != "repeats_ms" for n in numbers_in(key) + numbers_in(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in numbers_in(v)]
    if isinstance(value, str):
        return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", value) if n.strip(",")]
    return [] if isinstance(value, bool) or value is None else [float(value)]


def shown(text, known):
    """Whether a number as printed is one of the known ones, rounded."""
    value = float(text.replace(",", ""))
    decimals = len(text.split(".")[1].split("e")[0]) if "." in text else 0
    if "e" in text or (0 < value < 0.1 and decimals != 3):  # with three decimals: a stage's milliseconds
        return any(abs(n - value) <= 0.051 * abs(n) for n in known)
    return any(abs(n - value) <= 0.5000001 * 10**-decimals for n in known)


def case_of(document, suite):
    """Its first case."""
    return next(case for case in document["cases"] if case["suite"] == suite)


@pytest.fixture
def written(recorded_run):
    """The page of a real run."""
    return page(recorded_run)


def test_the_page_is_well_formed_and_self_contained(written, document):
    parsed(written)
    charts = re.findall(r"<figure.*?</figure>", written, re.S)
    profiles = [case["profile"] for case in document["cases"] if case["profile"]]
    gates = gates_of(document)
    assert len(charts) == len(document["cases"]) + len(profiles) + len(gates)
    bars = [bar for case in document["cases"] for bar in case["variants"]]
    bars += [stage for profile in profiles for stage in profile["stages"]]
    bars += [layer for gate in gates for layer in gate["layers"]]
    assert written.count('role="img"') == len(bars)
    for chart in charts:
        ET.fromstring(chart)
    assert not re.search(r"""(?:src|href)=["'](?!#)""", written)
    assert "<script" not in written
    assert "prefers-color-scheme" in written


def gates_of(document):
    return [gate for case in document["cases"] for gate in case["gate"] or ()]


def samples_in(document):
    variants = [variant for case in document["cases"] for variant in case["variants"]]
    return [ms for variant in variants for repeat in variant["step_time"]["repeats_ms"] for ms in repeat]


def test_every_number_on_the_page_is_in_the_document(written, document):
    shares = [case["communication"]["predictions"] for case in document["cases"] if case["communication"]]
    percents = [100 * n for n in numbers_in([gates_of(document), shares])]
    memory_gib = [n / 1024 for name, n in document["environment"]["host"].items() if name.endswith("_mib") and n]
    # 1× the baseline, the interval's share
    known = [*numbers_in(document), *percents, *memory_gib, *gains(document), 1.0, 95.0]
    found = [n for text in parsed(written).text for n in NUMBER.findall(text)]
    assert len(found) > 100
    assert [n for n in found if not shown(n, known)] == []
    known = [*samples_in(document), *range(1, 13), *numbers_in(document)]  # the turns, and the steps a sample has
    found = [n for text in parsed(written).folded for n in NUMBER.findall(text)]
    assert len(found) > len(samples_in(document))
    assert [n for n in found if not shown(n, known)] == []


def gains(document):
    """What each technique of the stack adds to those before it, and all to Keras' defaults."""
    times = {v["name"]: StepTimes.from_dict(v["step_time"]) for v in case_of(document, "stack")["variants"]}
    added = [name for name in times if name.startswith("+ ")]
    pairs = [*itertools.pairwise(["naive Keras", *added]), *(("Keras' defaults", name) for name in added)]
    return numbers_in([compare(times[one], times[other]).to_dict() for one, other in pairs])


def test_the_check_above_would_find_a_made_up_number(document):
    changed = copy.deepcopy(document)
    variant = case_of(changed, "pipeline")["variants"][2]
    variant["comparison"]["ratio"] = 123.45
    known = [*numbers_in(document), 1.0, 95.0]
    found = [n for text in parsed(page(from_json(changed))).text for n in NUMBER.findall(text)]
    assert [n for n in found if not shown(n, known)]


@pytest.mark.parametrize("render", [page, terminal])
def test_every_variant_and_verdict_is_there(recorded_run, render):
    text = html.unescape(render(recorded_run))
    for case in recorded_run.cases:
        for variant in case.variants:
            assert variant.name in text
            assert formatting.verdict(variant) in text
            assert formatting.speed(variant) in text


def test_the_profile_of_the_input_is_drawn(document, written):
    (profile,) = [case["profile"] for case in document["cases"] if case["profile"]]
    assert profile["verdict"] in written
    assert {"decode", "crop", "batch"} <= {stage["name"] for stage in profile["stages"]}
    for stage in profile["stages"]:
        assert f"{stage['ms_per_example']:,.3f}\xa0ms, busy {stage['busy_percent']:.0f}\xa0%" in written
    assert "/" not in profile["name"]


def test_what_the_gate_found_is_drawn(document, written):
    gates = gates_of(document)
    assert [gate["policy"] for gate in gates] == ["mixed_bfloat16", "mixed_float16"]
    text = html.unescape(written).replace("\xa0", " ")
    for gate in gates:
        assert gate["verdict"] in text
        for layer in gate["layers"]:
            assert percent(layer["output"]["error"]) in text


def test_a_ceiling_is_drawn_as_nothing_better(recorded_run):
    tones = {
        v.name: bar.tone
        for case in recorded_run.cases
        for v, bar in zip(case.variants, formatting.bars(case), strict=True)
    }
    assert (tones["step alone"], tones["one process"], tones["naive"]) == ("plain", "plain", "baseline")


def test_the_table_fits_its_width(recorded_run):
    lines = terminal(recorded_run).splitlines()
    assert max(map(len, lines)) <= WIDTH == 80
    assert sum(line.endswith("baseline") for line in lines) == len(recorded_run.cases)
    words = {word for case in recorded_run.cases for v in case.variants for word in formatting.name(v).split()}
    assert words <= set(terminal(recorded_run).split())  # none is broken
    _, _, suites = formatting.load(recorded_run).partition(": tfopt-bench run ")
    assert not suites or f"tfopt-bench run {suites}" in lines


@pytest.fixture
def on_a_gpu(document):
    """The run as a GPU would have it: memory peaks, and a recommended variant."""
    changed = copy.deepcopy(document)
    for case in changed["cases"]:
        for number, variant in enumerate(case["variants"]):
            variant["peak_memory_mib"] = 38123.4 + number
    precision = case_of(changed, "precision")
    precision["workload"] = "resnet50"
    precision["variants"][1].update(name="mixed_bfloat16, XLA", recommended=True)
    return from_json(changed)


@pytest.mark.parametrize("render", [page, terminal])
def test_memory_and_the_recommended_are_shown_where_known(recorded_run, on_a_gpu, render):
    text = render(on_a_gpu)
    assert "38,123" in text
    assert "mixed_bfloat16, XLA *" in " ".join(text.split()) or "mixed_bfloat16," in text
    assert "resnet50: the recommended variant (*, mixed_bfloat16, XLA) is" in text.replace("\n", " ")
    assert "Peak" not in render(recorded_run)


def test_the_wider_table_fits_its_width(on_a_gpu):
    lines = terminal(on_a_gpu).splitlines()
    assert max(map(len, lines)) <= WIDTH
    for case in on_a_gpu.cases:
        for variant in case.variants:
            shown = formatting.memory(variant), formatting.median(variant), formatting.name(variant).split()[0]
            assert any(all(cell in line for cell in shown) for line in lines)


@pytest.mark.parametrize(
    ("samples", "changes", "text"),
    [
        ((10.0, 5.0, 8.0), (), "is the fastest."),
        ((10.0, 5.0, 4.0), (), "is slower than c."),
        ((10.0, 5.0, 4.0), ("c",), "is the fastest."),  # what computes something else is no rival
        ((10.0, 5.0, 4.99), (), "is as fast as c, the fastest, within noise."),
        ((10.0, 4.99, 5.0), (), "is the fastest, within noise."),
    ],
)
def test_whether_the_recommended_is_the_fastest(samples, changes, text):
    variants = [
        VariantResult(
            name=name,
            times=StepTimes(repeats_ms=((ms, ms),) * 6, steps_per_sample=1, first_step_seconds=1.0),
            metrics=Metrics(
                interval_ms=(ms, ms), comparison=None, verdict="changes the result" if name in changes else "faster"
            ),
            recommended=name == "b",
            ceiling=name == "d",  # which is no rival
        )
        for name, ms in zip("abcd", (*samples, 1.0), strict=True)
    ]
    case = CaseResult(suite="s", workload="w", question="?", unit="step", baseline="a", variants=tuple(variants))
    assert formatting.recommended(case) == f"w: the recommended variant (*, b) {text}"
    variants[1] = replace(variants[1], recommended=False)
    assert formatting.recommended(replace(case, variants=tuple(variants))) == ""


@pytest.mark.parametrize("render", [page, terminal])
def test_what_went_wrong_is_said(document, render):
    changed = copy.deepcopy(document)
    changed["status"] = "out of budget"
    broken = case_of(changed, "precision")
    broken["error"] = "RuntimeError: <broken> [bench] [/red]"
    broken["variants"] = []
    case_of(changed, "xla")["variants"][1]["verdict"] = "changes the result"
    text = " ".join(render(from_json(changed)).replace("&lt;", "<").replace("&gt;", ">").split())
    assert "out of budget" in text
    assert "RuntimeError: <broken> [bench] [/red]" in text
    assert "Failed: precision on digits." in text
    assert "Changes the result: XLA on." in text


def test_the_lead_names_what_helped_best_first(document):
    changed = copy.deepcopy(document)
    for case in changed["cases"]:
        for variant, ratio in zip(case["variants"][1:], (2.0, 3.0, 1.5), strict=False):
            variant["verdict"], variant["comparison"]["ratio"] = "faster", ratio
    run = from_json(changed)
    steps, parts = formatting.lead(run).split(" Faster input, without training: ")
    assert steps.startswith("Faster than its baseline here: mixed_float16 3.00×; build_pipeline 3.00×;")
    assert parts.startswith("cache on disk 3.00×")  # alone it says little about training
    assert "cache" not in steps.replace("build_pipeline with cache", "")
    assert "+ overlap" not in formatting.lead(run)
    ceilings = [v for case in run.cases for v in case.variants if v.ceiling]
    assert [alone.name for alone in ceilings] == ["step alone", "step alone", "one process"]
    for alone in ceilings:
        assert alone.name not in formatting.lead(run)
        assert formatting.verdict(alone) == "the ceiling"
    for case in changed["cases"]:
        for variant in case["variants"]:
            variant["verdict"] = "no difference"
    assert formatting.lead(from_json(changed)).startswith("Nothing was faster than its baseline here.")
    assert formatting.lead(replace(run, cases=())).startswith("Nothing was measured.")
    stack = tuple(case for case in run.cases if case.suite == "stack")
    assert formatting.lead(replace(run, cases=stack)).startswith("Faster than its baseline here: ")


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.5, "0.50"), (0.0123, "0.012")]
)
def test_numbers(value, text):
    assert formatting.number(value) == text


@pytest.fixture
def cut(recorded_run):
    """The run with a variant that was refused, another without turns, and a case cut short, another that failed."""
    stack, precision, xla, *_ = recorded_run.cases
    refused = VariantResult(name="XLA on", refused="no such device")
    xla = replace(xla, variants=(xla.variants[0], refused))
    waiting = VariantResult(name="mixed_float16")
    precision = replace(
        precision,
        variants=(*precision.variants[:2], waiting),
        unfinished="the budget ran out",
        planned_turns=99,
    )
    stack = replace(stack, error="RuntimeError: lost", variants=stack.variants[:2], planned_turns=99)
    return replace(
        recorded_run, cases=(stack, precision, xla), status="out of budget", resumed=("driver: 580.1 and 580.2",)
    )


@pytest.mark.parametrize("render", [page, terminal])
def test_what_is_missing_is_said_beside_what_was_measured(cut, render):
    text = " ".join(html.unescape(render(cut)).split())
    of_stack, of_precision = (case.measured[0].turns for case in cut.cases[:2])
    for said in (
        "Failed: stack on photos. Unfinished: precision on digits. Refused on this machine: XLA on (xla on digits).",
        "Changed before the run was resumed: driver: 580.1 and 580.2.",
        "digits, unfinished, the budget ran out. Turns measured of 99 each: "
        f"float32 {of_precision}, mixed_bfloat16 {of_precision},",
        "photos, unfinished, RuntimeError: lost. Turns measured of 99 each: "
        f"naive Keras {of_stack}, Keras' defaults {of_stack}.",
        "not measured",
        "no such device",
    ):
        assert said in text
    for case in cut.cases:
        for variant in case.measured:
            assert (formatting.step_time if render is page else formatting.median)(variant) in text


def test_a_case_that_lacks_only_its_check_says_so(recorded_run):
    case = next(case for case in recorded_run.cases if case.suite == "xla")
    cut = replace(case, planned_turns=case.variants[0].turns, unfinished="the budget ran out")
    assert formatting.unfinished(cut) == (
        "digits, unfinished, the budget ran out. All turns were measured; the check is missing."
    )


def test_columns_that_need_it_are_explained_on_the_page(recorded_run):
    cases = [case for case in recorded_run.cases if case.limit and case.operations_per_example is None]
    text = html.unescape(page(replace(recorded_run, cases=tuple(cases))))
    assert "Of the ceiling is the variant's speed" in text
    assert "MFU" not in text
    others = tuple(case for case in recorded_run.cases if not case.limit)
    assert "Of the ceiling" not in page(replace(recorded_run, cases=others))


def test_notes_of_variants_are_a_table(recorded_run, written):
    for case in recorded_run.cases:
        for variant in case.variants:
            assert f'<td class="l">{variant.note}</td>' in html.unescape(written)


def test_no_unit_is_wrapped_off_its_number(written):
    text = " ".join(parsed(written).text)
    assert "\xa0ms" in text
    assert not re.search(r"\d (?:%|ms|s|GiB/s|TFLOP/s)(?![\w/])", text)


def test_percentages_have_one_form(recorded_run):
    assert not re.search(r"\d%", "".join(parsed(page(recorded_run)).text) + terminal(recorded_run))


@pytest.mark.parametrize(("percent", "said"), [(0.4, False), (3.0, True)])
def test_other_programs_are_left_out_at_0(recorded_run, percent, said):
    cases = tuple(replace(case, others_cpu_percent=percent) for case in recorded_run.cases)
    assert ("Other programs" in formatting.load(replace(recorded_run, cases=cases))) == said


@pytest.mark.parametrize("render", [page, terminal])
def test_a_case_without_any_turn_is_shown(cut, render):
    stack, precision, xla = cut.cases
    nothing = [VariantResult(name=v.name, refused=v.refused) for v in xla.variants]
    cases = (
        replace(precision, variants=()),
        replace(stack, variants=()),
        replace(xla, variants=tuple(nothing)),
        replace(xla, suite="x", variants=(nothing[1], cut.cases[0].variants[1])),
    )
    text = html.unescape(render(replace(cut, cases=cases)))
    assert all(said in text for said in ("the budget ran out", "RuntimeError: lost", "no such device"))


def test_a_line_of_a_comparison_without_figures():
    variant = VariantResult(
        name="a",
        times=StepTimes(repeats_ms=((1.0,),), steps_per_sample=1, first_step_seconds=1.0),
        metrics=Metrics(interval_ms=(1.0, 1.0), comparison=None, verdict="not compared"),
    )
    assert (formatting.speed(variant), formatting.verdict(variant)) == ("", "not compared")
    compared = replace(variant.metrics, comparison=Comparison(ratio=2.0, interval=(1.9, 2.1)), verdict="faster")
    assert formatting.speed(replace(variant, metrics=compared)) == "2.00× [1.90–2.10]"
