"""benchmarks/memory_estimate.py: the recorded comparison with what steps really take, and that the script makes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import memory_estimate
import pytest
import tensorflow as tf

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "memory_estimate.py"
RECORD = json.loads((BENCHMARKS / "results/memory-estimate-cpu.json").read_text())


def test_all_nets_are_recorded_on_a_named_machine():
    assert list(RECORD["figures"]) == list(memory_estimate.NETS)
    assert RECORD["environment"]["packages"]["tensorflow"]
    assert RECORD["environment"]["host"]["cpu_model"]


@pytest.mark.parametrize("way", ["XLA", "graph"])
@pytest.mark.parametrize("name", RECORD["figures"])
def test_recorded_estimates_are_as_close_as_the_docs_say(name, way):
    found = RECORD["figures"][name][way]
    assert found["estimate"]["source"] == ("XLA's buffer assignment" if way == "XLA" else "the step's graph")
    if way == "XLA":
        assert abs(found["off_by"]) < 0.001
    elif "float16" in name:  # whose convolutions take workspace on that processor
        assert -0.4 < found["off_by"] < 0
    else:
        assert -0.06 < found["off_by"] < 0.16
    assert found["off_by"] == pytest.approx(found["estimate"]["total_mib"] / found["taken"]["mib"] - 1)


@pytest.mark.parametrize("name", RECORD["figures"])
def test_under_xla_the_allocator_takes_no_more_either(name):
    found = RECORD["figures"][name]["XLA"]
    assert found["estimate"]["total_mib"] == pytest.approx(found["taken"]["allocator_mib"], rel=0.1)


@pytest.mark.slow
def test_the_script_compares_here_too(tmp_path):
    results = tmp_path / "results.json"
    environ = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "1"}  # off by default on some processors
    subprocess.run(
        [sys.executable, SCRIPT, results, "--only", "convolutional net"], check=True, capture_output=True, env=environ
    )
    (found,) = json.loads(results.read_text())["figures"].values()
    assert abs(found["XLA"]["off_by"]) < 0.1
    # On a GPU, and on a CPU without oneDNN, convolutions ask for a workspace of their own.
    if not tf.config.list_physical_devices("GPU"):
        assert abs(found["graph"]["off_by"]) < 0.1
