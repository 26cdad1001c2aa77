"""The snippets of docs/memory.md run as they stand."""

import json
from pathlib import Path

import pytest
from snippets import run_snippets

ROOT = Path(__file__).parents[2]


def test_what_recomputing_saves_was_recorded():
    page = " ".join((ROOT / "docs" / "memory.md").read_text("utf-8").split())
    figures = json.loads((ROOT / "benchmarks" / "results" / "recompute-cpu.json").read_text("utf-8"))["figures"]
    plain, auto, cheap = (figures["transformer, 12 blocks"][choice] for choice in ("plain", "auto", "activations"))
    taken = f"needs {auto['mib']:.1f} MiB for activations, gradients and workspace instead of {plain['mib']:.1f}"
    assert f"{taken}, for {auto['time_ratio']:.2f} times the step time" in page
    assert f'with `"activations"`, {cheap["mib"]:.1f} MiB for {cheap["time_ratio"]:.2f} times.' in page
    chain = figures["64 dense layers"]
    auto, cheap, each = (f"{100 * chain[way]['memory_share']:.0f} %" for way in ("auto", "activations", "each layer"))
    segments = chain["auto"]["recomputed"]
    assert f'needs {auto} in {segments} segments, {cheap} with `"activations"`, and {each} with' in page


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    assert run_snippets("memory.md", tmp_path).splitlines()[-1].startswith("128 ")
