"""The README's figures are those of a recorded run, and its example runs as it stands."""

import json
import re
from pathlib import Path

import pytest
from snippets import rows_to_call, run_rows, run_snippets, snippets_of, unresolved

from tfopt.measure import StepTimes, compare

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_three_minutes():
    assert len(README.splitlines()) <= 90


def test_the_figures_before_and_after_are_those_of_the_recorded_run():
    document = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))
    assert document["status"] == "complete"
    (case,) = (case for case in document["cases"] if (case["suite"], case["workload"]) == ("stack", "photos"))
    variants = {variant["name"]: variant for variant in case["variants"]}
    before, after = variants["Keras' defaults"], next(v for v in case["variants"] if v["recommended"])
    assert before["check"]["passed"]
    assert after["check"]["passed"]
    assert after["name"] == "+ overlap"
    times = [StepTimes.from_dict(variant["step_time"]) for variant in (before, after)]
    comparison = compare(*times)
    low, high = comparison.interval
    prose = " ".join(README.split())
    assert f"took {times[0].median_ms:.1f} ms a step with Keras' defaults and {times[1].median_ms:.1f} ms" in prose
    assert f"{comparison.ratio:.2f}× as fast (95 % interval {low:.2f}–{high:.2f}; one turn of six was slower)" in prose


def test_recorded_runs_name_no_place():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert not re.search(r'"[^"]*(/home|/root|/Users|/tmp|/var)[^"]*"', path.read_text()), path


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    assert len([line for line in snippets_of("README.md")[0].splitlines() if line]) <= 8
    run_snippets("README.md", tmp_path)
    for name in ("utilization", "throughput"):
        assert (tmp_path / "logs" / f"{name}.csv").read_text().count("\n") > 1


@pytest.mark.slow
def test_each_row_of_the_table_runs_as_it_stands(tmp_path):
    run_rows(tmp_path)
    assert (tmp_path / "records").exists()


def test_links_lead_to_files():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link.partition("#")[0]).exists(), link


def test_each_call_in_the_table_is_read():
    rows = rows_to_call()
    assert len(rows) >= 14
    assert all(rows)
    assert rows[0] == ["tfopt.diagnose(model, data)", "tfopt.tune(model, data)"]
    assert "tfopt.memory.recompute(model)" in rows[6]
    assert [unresolved(call) for row in rows for call in row if unresolved(call)] == []


def test_the_two_commands_are_where_ci_finds_them():
    found = re.findall(r"^pip install '\.\[(bench|test)\]' && (.*)$", README, re.M)
    assert found == [("bench", "tfopt-bench"), ("test", "python -m pytest -n 2")]
