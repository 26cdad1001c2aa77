"""benchmarks/pipelines.py: what it checks, how goals are judged, that every case runs, and the recorded table."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pipeline_cases
import pytest
from pipeline_cases import (
    HAND,
    TFOPT,
    TINY,
    TORCH,
    Case,
    Way,
    at_least,
    at_most,
    figures,
    measure,
    of_arrays,
    of_loaders,
    of_mixtures,
    of_remote,
    of_tables,
)

ROOT = Path(pipeline_cases.__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "pipelines.py"
RESULTS = ROOT / "benchmarks" / "results" / "pipelines-cpu.json"


@pytest.mark.slow
def test_a_case_is_checked_and_measured_in_turn(tmp_path):
    reported = []
    found = measure(of_arrays.small_rows(tmp_path, TINY), 2, reported.append)
    assert found == reported[-1]
    assert len(reported) == 2
    measured = {way["name"]: way for way in found["ways"] if not way["skipped"]}
    assert {TFOPT, HAND} <= set(measured)
    for way in measured.values():
        assert len(way["wall_ms"]) == len(way["cpu_ms"]) == 2
    assert figures.verdict(found) in ("met", "missed")


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([([1.0, 2.0], [3, 1]), ([3.0, 4.0], [3, 2])], "3 different"),
        ([([1.0, 2.0], [3, 1])], "2 examples"),
        ([([1.0, 2.0], [3, 1]), ([3.0, 4.0], [0, 2]), ([2.0, 1.0], [1, 3])], "6 examples"),
        ([([1.0, 2.0], [3, 1]), ([3.0], [0])], "3 examples"),
        ([([1.0, 2.0], [0, 1]), ([3.0, 4.0], [2, 3])], "not shuffled"),
        ([([1.0, 2.0], [3, 1]), ([3.0, 5.0], [0, 2])], "do not belong"),
    ],
)
def test_ways_that_do_other_work_are_refused(batches, says):
    inputs = {3: 1.0, 1: 2.0, 0: 3.0, 2: 4.0}
    right = None if "belong" not in says else lambda x, labels: [inputs[label] for label in labels] == list(x)
    way = Way(name=HAND, note="", make=list)
    case = Case(name="c", question="", timed="epoch", goal=None, ways=[way], examples=4, batch=2, right=right)
    with pytest.raises(AssertionError, match=says):
        pipeline_cases.check(case, way, batches)


def document(goal, hand, tfopt):
    goal = goal and {"bound": goal.bound, "text": goal.text, "of_time": goal.of_time}
    ways = [{"name": HAND, "wall_ms": hand, "cpu_ms": hand}, {"name": TFOPT, "wall_ms": tfopt, "cpu_ms": tfopt}]
    return {"question": "q", "goal": goal, "ways": ways}


@pytest.mark.parametrize(
    ("goal", "hand", "tfopt", "cell", "verdict"),
    [
        (at_least(0.95), [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "1.00× [1.00–1.00]", "met"),
        (at_least(0.95), [1.0, 2.0, 9.0], [2.0, 4.0, 9.0], "0.50× [0.23–1.70]", "missed"),
        (at_most(1.5), [1.0, 2.0, 3.0], [1.4, 2.8, 4.2], "1.40× [1.40–1.40]", "met"),
        (at_most(1.5), [1.0, 2.0, 3.0], [1.6, 3.2, 4.8], "1.60× [1.60–1.60]", "missed"),
        (None, [1.0], [2.0], "0.50×", "no goal"),
        # Turns that a slow way left out, and a last round that was cut short, are in no ratio.
        (at_least(0.95), [1.0, 2.0, 4.0, 7.0], [1.0, None, 4.0], "1.00×", "met"),
        (at_least(0.95), [1.0], [], "–", "not measured"),
    ],
)
def test_goals_are_judged_by_the_median_of_the_ratios(goal, hand, tfopt, cell, verdict):
    cells = figures.cells(document(goal, hand, tfopt))
    assert cells[4] == cells[5] == cell
    assert cells[-1] == verdict


def test_a_case_that_failed_says_so():
    assert figures.verdict(document(at_least(1), [1.0], [1.0]) | {"error": "it broke"}) == "failed: it broke"


ONE_OF_EACH = ["small rows", "records, written", "disk cache, large rows", "images, later", "first batch, generator"]


@pytest.mark.parametrize(
    "cases", [pytest.param(ONE_OF_EACH, marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.campaign)]
)
def test_every_case_runs(tmp_path, cases):
    results = tmp_path / "results.json"
    command = [sys.executable, SCRIPT, results, "--tiny", *(word for case in cases for word in ("--case", case))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(results.read_text())
    assert found["status"] == "complete"
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [case["name"] for case in found["cases"]] == listed
    for case in found["cases"]:
        assert case.get("error") is None
    assert ran.stdout.endswith(figures.markdown(found))


def test_the_run_of_tables_and_others_is_in_the_docs():
    found = json.loads(RESULTS.with_name("pipelines-tables-cpu.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
    assert {figures.verdict(case) for case in found["cases"]} == {"met"}
    assert "All goals for tables, mixtures, Keras' data sets and a start from the middle are met" in " ".join(
        page.split()
    )
    cases = {case["name"]: case for case in found["cases"]}
    others = {"first batch, from the middle"} | of_loaders.CASES.keys()
    assert set(cases) == of_tables.CASES.keys() | of_mixtures.CASES.keys() | others
    held, read = (figures.speed(cases[name], TORCH, figures.JUDGED_BY).ratio for name in of_tables.CASES)
    said = f"tfopt reaches {held:.2f}× of its speed where rows are held, and {read:.2f}× by row group."
    assert said in " ".join(page.split())


def test_the_run_of_remote_files_is_in_the_docs():
    found = json.loads(RESULTS.with_name("pipelines-remote-cpu.json").read_text(encoding="utf-8"))
    assert [case["name"] for case in found["cases"]] == list(of_remote.CASES)
    assert {figures.verdict(case) for case in found["cases"]} == {"met"}
    speeds = [figures.speed(case, figures.HAND, figures.JUDGED_BY).ratio for case in found["cases"]]
    page = " ".join((ROOT / "docs" / "sources.md").read_text(encoding="utf-8").split())
    assert f"at {min(speeds):.2f} to {max(speeds):.2f} times the speed of fsspec's own `get`" in page


def test_the_recorded_run_is_whole_and_in_the_docs():
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert found["status"] == "complete"
    page = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
    lines = [figures.cells(case) for case in found["cases"] if figures.verdict(case) == "missed"]
    assert re.findall(r"^\| .* \| ([≥≤] .*) \| (.*) \|$", page, re.M) == [
        (goal, wall) for _, goal, _, _, wall, *_ in lines
    ]
    host, beside = found["environment"]["host"], found["environment"]["beside"]
    assert f"Grain {beside['grain']}, on {host['cpu_model']} ({host['cpus']:g} CPUs" in " ".join(page.split())
    verdicts = [figures.verdict(case) for case in found["cases"]]
    assert set(verdicts) <= {"met", "missed", "no goal"}
    (met, missed) = re.search(r"(\d+) goals are met, (\d+) missed", " ".join(page.split())).groups()
    assert (int(met), int(missed)) == (verdicts.count("met"), verdicts.count("missed"))
    cases = {case["name"]: case for case in found["cases"]}
    sliced = figures.speed(cases["large rows"], "by hand, slices", figures.JUDGED_BY)
    cached = figures.speed(cases["large rows, cached"], "by hand, batch", figures.JUDGED_BY)
    assert f"{sliced.ratio:.2f}× of their speed, and {cached.ratio:.2f}× behind the cache" in " ".join(page.split())
