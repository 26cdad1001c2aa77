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


def test_what_it_costs_is_what_was_recorded():
    document = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))
    cases = {case["workload"]: case for case in document["cases"] if case["suite"] == "distribute"}
    gains = {v["name"]: v["comparison"] for case in cases.values() for v in case["variants"] if v["comparison"]}
    text = (ROOT / "docs" / "distribution.md").read_text(encoding="utf-8")
    said = " ".join(text.partition("## What does it cost?")[2].partition("\n## ")[0].split())
    for name in ("strategy()", "strategy(), fit", "shard_optimizer"):
        assert f"{gains[name]['ratio']:.2f} times" in said, name
        assert "[{:.2f}–{:.2f}]".format(*gains[name]["interval"]) in said, name
    assert f"ran {gains['LocalSteps(8)']['ratio']:.2f} times as fast" in said
    found = cases["mlp, 2 processes"]["communication"]
    sharding = found["sharding"]
    mib = {key: f"{value / 2**20:.2f}" for key, value in (found | sharding).items() if key.endswith(("bytes", "step"))}
    assert f"kept {mib['state_bytes']} MiB of optimizer state instead of {mib['unsharded_state_bytes']}" in said
    assert f"sent {mib['measured_sent_bytes']} MiB per step instead of {mib['sent_bytes_per_step']}" in said
