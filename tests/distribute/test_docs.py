"""The snippets of docs/distribution.md and docs/clusters.md run as they stand, one after the other."""

import json
from pathlib import Path

import pytest
from snippets import run_snippets

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("distribution.md", tmp_path)
    assert "one device: no strategy" in printed
    assert "worker 1 (127.0.0.1:2223) of 2 workers, from arguments\nFalse 1 2\none process" in printed


def test_the_snippets_for_clusters_run(tmp_path):
    assert "worker 6 (set-w-1-2.set:2222) of 8 workers, from Kubernetes\n" in run_snippets("clusters.md", tmp_path)


def test_what_less_traffic_does_is_what_was_recorded():
    recorded = json.loads((ROOT / "benchmarks" / "results" / "less-traffic-cpu.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "distribution.md").read_text(encoding="utf-8")
    assert f"loss after {recorded['steps']} steps" in text
    rows = [line.split(" | ", 1)[1] for line in text.splitlines() if line.startswith("| ") and line.count(" | ") == 3]
    for name, one in recorded["figures"].items():
        figures = f"{one['sent_bytes_per_step']:,.0f} | {one['loss']:.4f} | {one['synchronizations']:.0f} |"
        assert figures in rows, name
        if "Local" not in name:  # measured after the warm-up, with logs and protocol
            assert 0 < one["measured_sent_bytes_per_step"] - one["sent_bytes_per_step"] < 5000, name
