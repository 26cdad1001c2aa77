"""The snippets of docs/models-cheaper.md run as they stand, and its figures are those of the recorded runs."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from snippets import run_snippets

ROOT = Path(__file__).parents[2]


def recorded(suite):
    document = json.loads((ROOT / "benchmarks" / "results" / f"{suite}-cpu.json").read_text("utf-8"))
    return {case["workload"]: case["variants"] for case in document["cases"]}


def test_its_figures_are_those_of_the_recorded_runs():
    text = " ".join((ROOT / "docs" / "models-cheaper.md").read_text("utf-8").split())
    found = recorded("compress")
    pairs = [found[name] for name in ("resnet, small", "mobilenet, small", "vit, small")]
    speeds = [f"{pruned['comparison']['ratio']:.2f}" for _, pruned in pairs]
    lost = [100 * (fmean(whole["check"]["values"]) - fmean(pruned["check"]["values"])) for whole, pruned in pairs]
    points = [f"{value:.1f}" for value in lost]
    assert f"the three nets {speeds[0]}, {speeds[1]} and {speeds[2]} times as fast" in text
    assert f"their accuracy was {points[0]}, {points[1]} and {points[2]} points lower" in text
    forms = {variant["name"]: variant["comparison"] for variant in recorded("cost")["convolution, 64 channels"]}
    assert f"at {forms['4 groups']['ratio']:.2f} times the speed of one without groups" in text
    assert f"a separable one at {forms['separable convolution']['ratio']:.2f} times" in text


@pytest.mark.slow
def test_the_snippets_run_as_they_stand(tmp_path):
    printed = run_snippets("models-cheaper.md", tmp_path)
    assert "small_resnet at batch size 32 takes" in printed
    assert "a separable convolution" in printed
    assert "of the channels and heads of" in printed
    assert (tmp_path / "cost.html").exists()
