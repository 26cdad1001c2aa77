"""The page and the table say what the document says, and nothing else."""

import copy
import html
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from tfopt.bench import columns, report, table, words
from tfopt.measure import StepTimes
from tfopt.precision.gate.precision_report import percent

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
def page(document):
    return report.page(document)


def test_the_page_is_well_formed_and_self_contained(page, document):
    parsed(page)
    charts = re.findall(r"<figure.*?</figure>", page, re.S)
    profiles = [case["profile"] for case in document["cases"] if case["profile"]]
    gates = gates_of(document)
    assert len(charts) == len(document["cases"]) + len(profiles) + len(gates)
    bars = [bar for case in document["cases"] for bar in case["variants"]]
    bars += [stage for profile in profiles for stage in profile["stages"]]
    bars += [layer for gate in gates for layer in gate["layers"]]
    assert page.count('role="img"') == len(bars)
    for chart in charts:
        ET.fromstring(chart)
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page)
    assert "<script" not in page
    assert "prefers-color-scheme" in page


def gates_of(document):
    return [gate for case in document["cases"] for gate in case["gate"] or ()]


def samples_in(document):
    variants = [variant for case in document["cases"] for variant in case["variants"]]
    return [ms for variant in variants for repeat in variant["step_time"]["repeats_ms"] for ms in repeat]


def test_every_number_on_the_page_is_in_the_document(page, document):
    shares = [case["communication"]["predictions"] for case in document["cases"] if case["communication"]]
    percents = [100 * n for n in numbers_in([gates_of(document), shares])]
    known = [*numbers_in(document), *percents, 1.0, 95.0]  # 1× the baseline, and the interval's share
    found = [n for text in parsed(page).text for n in NUMBER.findall(text)]
    assert len(found) > 100
    assert [n for n in found if not shown(n, known)] == []
    known = [*samples_in(document), *range(1, 13), *numbers_in(document)]  # the turns, and the steps a sample has
    found = [n for text in parsed(page).folded for n in NUMBER.findall(text)]
    assert len(found) > len(samples_in(document))
    assert [n for n in found if not shown(n, known)] == []


def test_the_check_above_would_find_a_made_up_number(document):
    changed = copy.deepcopy(document)
    variant = case_of(changed, "pipeline")["variants"][2]
    variant["comparison"]["ratio"] = 123.45
    known = [*numbers_in(document), 1.0, 95.0]
    found = [n for text in parsed(report.page(changed)).text for n in NUMBER.findall(text)]
    assert [n for n in found if not shown(n, known)]


@pytest.mark.parametrize("render", [report.page, table.render])
def test_every_variant_and_verdict_is_there(document, render):
    text = html.unescape(render(document))
    for case in document["cases"]:
        for variant in case["variants"]:
            assert variant["name"] in text
            assert words.verdict(variant) in text
            assert words.speed(variant) in text


def test_the_profile_of_the_input_is_drawn(document, page):
    (profile,) = [case["profile"] for case in document["cases"] if case["profile"]]
    assert profile["verdict"] in page
    assert {"decode", "crop", "batch"} <= {stage["name"] for stage in profile["stages"]}
    for stage in profile["stages"]:
        assert f"{stage['ms_per_example']:,.3f} ms, busy {stage['busy_percent']:.0f} %" in page
    assert "/" not in profile["name"]


def test_what_the_gate_found_is_drawn(document, page):
    gates = gates_of(document)
    assert [gate["policy"] for gate in gates] == ["mixed_bfloat16", "mixed_float16"]
    for gate in gates:
        assert gate["verdict"] in html.unescape(page)
        for layer in gate["layers"]:
            assert percent(layer["output"]["error"]) in page


def test_a_ceiling_is_drawn_as_nothing_better(document):
    tones = {
        v["name"]: bar.tone
        for case in document["cases"]
        for v, bar in zip(case["variants"], columns.bars(case), strict=True)
    }
    assert (tones["step alone"], tones["one process"], tones["naive"]) == ("baseline",) * 3


def test_the_table_fits_its_width(document):
    lines = table.render(document).splitlines()
    assert max(map(len, lines)) <= table.WIDTH
    assert sum(line.endswith("baseline") for line in lines) == len(document["cases"])


@pytest.fixture
def on_a_gpu(document):
    """The document as a GPU would have it: memory peaks, and a recommended variant."""
    changed = copy.deepcopy(document)
    for case in changed["cases"]:
        for number, variant in enumerate(case["variants"]):
            variant["peak_memory_mib"] = 38123.4 + number
    precision = case_of(changed, "precision")
    precision["workload"] = "resnet50"
    precision["variants"][1].update(name="mixed_bfloat16, XLA", recommended=True)
    return changed


@pytest.mark.parametrize("render", [report.page, table.render])
def test_memory_and_the_recommended_are_shown_where_known(document, on_a_gpu, render):
    text = render(on_a_gpu)
    assert "38,123" in text
    assert "mixed_bfloat16, XLA *" in text
    assert "resnet50: mixed_bfloat16, XLA, recommended for this device (*), is" in text.replace("\n", " ")
    assert "Peak" not in render(document)


def test_the_wider_table_fits_its_width(on_a_gpu):
    lines = table.render(on_a_gpu).splitlines()
    assert max(map(len, lines)) <= table.WIDTH
    for case in on_a_gpu["cases"]:
        for variant in case["variants"]:
            (line,) = [line for line in lines if words.step_time(variant) in line and words.name(variant) in line]
            assert line.endswith(words.verdict(variant))


@pytest.mark.parametrize(
    ("samples", "changes", "text"),
    [
        ((10.0, 5.0, 8.0), (), "is the fastest."),
        ((10.0, 5.0, 4.0), (), "is slower than c."),
        ((10.0, 5.0, 4.0), ("c",), "is the fastest."),  # what computes something else is no rival
        ((10.0, 5.0, 4.99), (), "is as fast as c, the fastest, within noise."),
    ],
)
def test_whether_the_recommended_is_the_fastest(samples, changes, text):
    variants = [
        {
            "name": name,
            "step_time": StepTimes(repeats_ms=((ms, ms),) * 6, steps_per_sample=1, first_step_seconds=1.0).to_dict(),
            "verdict": "changes the result" if name in changes else "faster",
            "recommended": name == "b",
            "ceiling": name == "d",
        }
        for name, ms in zip("abcd", (*samples, 1.0), strict=True)
    ]
    *variants, ceiling = variants  # which is no rival
    case = {"workload": "w", "variants": [*variants, ceiling]}
    assert words.recommended(case) == f"w: b, recommended for this device (*), {text}"
    variants[1]["recommended"] = False
    assert words.recommended(case) == ""


@pytest.mark.parametrize("render", [report.page, table.render])
def test_what_went_wrong_is_said(document, render):
    changed = copy.deepcopy(document)
    changed["status"] = "out of budget"
    broken = case_of(changed, "precision")
    broken["error"] = "RuntimeError: <broken> [bench] [/red]"
    broken["variants"] = []
    case_of(changed, "xla")["variants"][1]["verdict"] = "changes the result"
    text = " ".join(render(changed).replace("&lt;", "<").replace("&gt;", ">").split())
    assert "out of budget" in text
    assert "RuntimeError: <broken> [bench] [/red]" in text
    assert "Failed: precision on digits." in text
    assert "Changes the result: XLA on." in text


def test_the_lead_names_what_helped_best_first(document):
    changed = copy.deepcopy(document)
    for case in changed["cases"]:
        for variant, ratio in zip(case["variants"][1:], (2.0, 3.0, 1.5), strict=False):
            variant["verdict"], variant["comparison"]["ratio"] = "faster", ratio
    together = case_of(changed, "stack")["variants"][-2]
    assert (together["name"], together["recommended"]) == ("+ overlap", True)
    begin = f"From everything off to what is recommended: photos {words.number(together['comparison']['ratio'])}×. "
    listed = "Faster on this machine: mixed_float16 (3.00×), build_pipeline (3.00×),"
    assert words.lead(changed).startswith(begin + listed)
    assert "+ overlap" not in words.lead(changed)
    ceilings = [v for case in changed["cases"] for v in case["variants"] if v["ceiling"]]
    assert [alone["name"] for alone in ceilings] == ["step alone", "step alone", "one process"]
    for alone in ceilings:
        assert alone["name"] not in words.lead(changed)
        assert words.verdict(alone) == "the ceiling"
    for case in changed["cases"]:
        for variant in case["variants"]:
            variant["verdict"] = "no difference"
    assert words.lead(changed).startswith(f"{begin}Nothing measured here was faster than its baseline.")
    changed["cases"] = []
    assert words.lead(changed).startswith("Nothing was measured.")


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.5, "0.50"), (0.0123, "0.012")]
)
def test_numbers(value, text):
    assert words.number(value) == text
