"""benchmarks/precision_per_layer.py: the recorded table is the one in the documentation."""

import json
from pathlib import Path

import precision_per_layer

ROOT = Path(precision_per_layer.__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "precision-per-layer-cpu.json"


def test_the_recorded_run_is_whole_and_in_the_docs():
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(found["models"]) == set(precision_per_layer.MODELS)
    page = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert precision_per_layer.markdown(found) in page
    host = found["environment"]["host"]
    assert f"on {host['cpu_model']} ({host['cpus']:g} CPUs" in " ".join(page.split())


def test_what_was_chosen_passed_the_gate_and_was_faster():
    for found in json.loads(RESULTS.read_text(encoding="utf-8"))["models"].values():
        assert found["passed"]
        assert found["error"] <= found["tolerance"]
        half = any(policy != "float32" for policy in found["policy"].values())
        assert not half or found["speedup"]["float32"]["verdict"] == "faster"
