"""benchmarks/harness.py: results, tables and pages, and cases that are run as tfopt-bench runs them."""

import json
import sys

import harness
import numpy as np
import pytest

from tfopt.bench.cases import Case, Variant
from tfopt.measure import StepTimes


def times():
    return StepTimes(repeats_ms=((1.0, 1.0),), steps_per_sample=1, first_step_seconds=1.0)


def broken(stack):
    raise RuntimeError("broken on purpose")


def cases(scale):
    def case(name, timer):
        variants = [Variant(name=each, note="", timer=timer) for each in ("a", "b")]
        return Case(suite="own", workload=name, question="?", unit="step", variants=variants)

    return [case("good", lambda stack: times), case("bad", broken)]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
    with pytest.raises(SystemExit, match="1"):  # since one fails
        harness.run_cases("What it measures.", cases)


@pytest.mark.slow
def test_cases_are_measured_and_what_is_done_is_left_out(monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path, "--repeats", 2)
    (path,) = tmp_path.glob("*.json")
    assert str(path) in capsys.readouterr().out
    good, bad = json.loads(path.read_text())["cases"]
    assert [variant["step_time"]["repeats_ms"] for variant in good["variants"]] == [[[1.0, 1.0]] * 2] * 2
    assert (good["error"], bad["error"]) == (None, "RuntimeError: broken on purpose")
    run(monkeypatch, tmp_path, "--resume", "--repeats", 3)
    (path,) = tmp_path.glob("*.json")
    good, _ = json.loads(path.read_text())["cases"]
    assert good["planned_turns"] == 2  # as the first run left it
    run(monkeypatch, tmp_path, "--case", "ba", "--repeats", 2)
    _, path = sorted(tmp_path.glob("*.json"))
    assert [case["workload"] for case in json.loads(path.read_text())["cases"]] == ["bad"]


def test_results_are_written_read_and_missing(tmp_path):
    path = tmp_path / "results.json"
    harness.write(None, {})
    assert harness.read(None, {"a": 1}) == harness.read(path, {"a": 1}) == {"a": 1}
    harness.write(path, {"b": "µ"})
    assert harness.read(path, {"a": 1}) == harness.read(path) == {"b": "µ"}
    with pytest.raises(FileNotFoundError):
        harness.read(tmp_path / "none.json")


def test_an_interval_is_of_turns_resampled_together():
    turns = np.array([[1.0, 2.0, 9.0], [2.0, 4.0, 18.0]])
    assert harness.interval(lambda drawn: float(np.median(drawn[1] / drawn[0])), turns) == [2.0, 2.0]
    low, high = harness.interval(np.median, np.array([1.0, 2.0, 9.0]))
    assert (low, high) == (1.0, 9.0)


def test_a_page_is_filled_between_its_marks():
    page = "before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n"
    text = harness.table(("What", "ms"), [["a", "1"]], right=("ms",))
    expected = (
        "before\n<!-- figures -->\n\n| What | ms |\n| --- | ---: |\n| a | 1 |\n\n<!-- end of figures -->\nafter\n"
    )
    assert harness.filled(page, "figures", text) == harness.filled(expected, "figures", text) == expected
    with pytest.raises(ValueError, match=r"Expected the marks of 'others'\. Found none\."):
        harness.filled(page, "others", text)
