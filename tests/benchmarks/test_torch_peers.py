"""The PyTorch scripts train what tfopt-bench trains, and say what they need."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
# Trainable parameters, as in the workloads of tfopt-bench; those of ResNet-50 without the moving averages.
SIZES = {"gpt2": 124_475_904, "resnet50": 25_583_592}
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch, which is not installed")


def python(*arguments, path=()):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, PEERS, *sys.path)))}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SIZES)
def test_without_torch_the_reason_is_said(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    result = python(PEERS / f"{name}.py", "--tiny", path=[tmp_path])
    assert result.returncode == 3
    assert result.stdout.startswith("Skipped: expected torch. Found: no torch here. Run: pip install")


@needs_torch
@pytest.mark.parametrize("name", SIZES)
def test_a_net_of_the_same_size_is_measured(name):
    # Eager alone: compiling takes a minute.
    script = f"""
import json, torch, training, {name}
with torch.device("meta"):
    print(sum(parameter.numel() for parameter in {name}.workload(tiny=False).model().parameters()))
for feeding in (training.resident, training.pinned):
    print(json.dumps(training.measure({name}.workload(tiny=True), "cpu", False, feeding) | training.environment("cpu")))
"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr
    size, *variants = map(json.loads, result.stdout.splitlines())
    assert size == SIZES[name]
    assert [measured["variant"] for measured in variants] == ["eager, resident", "eager, pinned"]
    for measured in variants:
        assert measured["workload"] == name
        assert len(measured["samples_ms"]) == 2
        assert min(measured["samples_ms"]) > 0
        assert measured["peak_memory_mib"] is None
        assert measured["torch"]
