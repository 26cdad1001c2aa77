"""The snippets of docs/memory.md run as they stand."""

import json
from pathlib import Path

import pytest
from snippets import run_snippets

ROOT = Path(__file__).parents[2]


def test_what_recomputing_saves_was_recorded():
    page = " ".join((ROOT / "docs" / "memory.md").read_text("utf-8").split())
    figures = json.loads((ROOT / "benchmarks" / "results" / "recompute-cpu.json").read_text("utf-8"))["figures"]
    plain, auto = (figures["transformer, 12 blocks"][choice] for choice in ("plain", "auto"))
    taken = f"needs {auto['mib']:.1f} MiB for activations, gradients and workspace instead of {plain['mib']:.1f}"
    assert f"{taken}, for {auto['time_ratio']:.2f} times the step time" in page
    chain = figures["64 dense layers"]
    shares = [100 * chain[choice]["memory_share"] for choice in ("auto", "each layer")]
    assert f"needs {shares[0]:.0f} % in {chain['auto']['recomputed']} segments, and {shares[1]:.0f} % with" in page


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    assert run_snippets("memory.md", tmp_path).splitlines()[-1].startswith("128 ")
