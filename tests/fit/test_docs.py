"""The snippets of docs/fit.md run as they stand, one after the other, and its figures are those recorded."""

import json
from pathlib import Path

import pytest
from snippets import run_snippets

from tfopt.measure import StepTimes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("fit.md", tmp_path).splitlines()
    assert sum("val_accuracy" in line for line in printed) == 2
    assert [line.split(":")[0] for line in printed if line[0].isdigit() and ": " in line][-5:] == [
        "0",
        "50",
        "100",
        "150",
        "200",
    ]
    assert printed[-1] == "498"


def test_what_fit_adds_is_what_was_recorded():
    recorded = json.loads((ROOT / "benchmarks" / "results" / "fit-overhead-cpu.json").read_text(encoding="utf-8"))
    times = {name: StepTimes.from_dict(each) for name, each in recorded["times"].items()}
    alone = times["step"].median_ms
    share = (times["overlapped"].median_ms - alone) / (times["stock"].median_ms - alone)
    assert share == pytest.approx(recorded["overhead_ratio"])
    low, high = recorded["interval"]
    said = " ".join((ROOT / "docs" / "fit.md").read_text(encoding="utf-8").split())
    adds = f"{100 * share:.0f} % ({100 * low:.0f}–{100 * high:.0f} %)"
    assert f"`fit` adds {adds} of the overhead that stock `fit` adds to the step of a tiny model" in said
    found = recorded["conversions"]
    assert f"converts logs {found['overlapped']} times in {found['steps']} steps instead of {found['steps']}" in said
