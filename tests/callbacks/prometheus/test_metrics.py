"""What Prometheus is served: labels, names, base units."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tfopt.callbacks.prometheus.metrics import PACE_KEYS, Exported
from tfopt.callbacks.shared.histogram import Histogram
from tfopt.callbacks.shared.run import Run
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS
from tfopt.hardware import GpuSample

# What Prometheus' guide to names takes for a unit that is not a base unit, or an abbreviation of one.
NOT_BASE = "percent|mib|gib|kib|kb|mb|gb|mhz|ghz|ms|us|ns|s|sec|minutes|hours|tflops|mw|kwh|w|j|c"


def text(exported):
    registry = CollectorRegistry()
    registry.register(exported)
    return generate_latest(registry).decode()


@pytest.fixture
def everything():
    """One in which every reading is known."""
    times = Histogram()
    times.add([0.004, 0.03, 0.03, 7.0])
    readings = dict.fromkeys((*GPU_KEYS, *HOST_KEYS), 50.0)
    row = GpuSample(0.0, 0.0, index=0, uuid="GPU-a", throttle_reasons=("power_cap",), **readings)
    rows = (row, dataclasses.replace(row, index=1, uuid="GPU-b"))
    pace = dict.fromkeys(PACE_KEYS, 50.0)
    return Exported(Run(), rows=rows, throughput=pace, step_times=times, logs={"loss": 0.5})


def test_base_units(everything):
    """By hand: half, 50 MiB, 50 MHz, 50 TFLOPs, and what is a base unit already."""
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text(everything))
        for sample in family.samples
    }
    assert found["tfopt_gpu_utilization_ratio"] == found["tfopt_host_cpu_ratio"] == found["tfopt_mfu_ratio"] == 0.5
    assert found["tfopt_gpu_memory_used_bytes"] == found["tfopt_pcie_rx_bytes_per_second"] == 52_428_800
    assert found["tfopt_sm_clock_hertz"] == 50_000_000
    assert found["tfopt_model_flops_per_second"] == 5e13
    assert found["tfopt_gpu_power_watts"] == found["tfopt_gpu_temperature_celsius"] == 50
    assert found["tfopt_gpu_energy_joules_total"] == found["tfopt_examples_per_second"] == 50
    assert found["tfopt_step_time_seconds_sum"] == pytest.approx(7.064)


def test_names_are_as_prometheus_wants_them(everything):
    for family in text_string_to_metric_families(text(everything)):
        assert family.documentation.endswith(".")
        assert re.fullmatch(r"tfopt(_[a-z0-9]+)+", family.name)
        assert not re.search(rf"_({NOT_BASE})(_|$)", family.name), family.name
        assert (family.type == "counter") == any(sample.name.endswith("_total") for sample in family.samples)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
def test_promtool_finds_nothing_to_say(everything):
    check = subprocess.run(["promtool", "check", "metrics"], input=text(everything), capture_output=True, text=True)
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


@pytest.mark.parametrize(("task", "rank"), [(None, "0"), ("worker", "1"), ("evaluator", "")])
def test_every_sample_names_run_and_rank(everything, monkeypatch, task, rank):
    if task is not None:
        config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": task, "index": task == "worker"}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    exported = dataclasses.replace(everything, run=Run())
    samples = [sample for family in text_string_to_metric_families(text(exported)) for sample in family.samples]
    assert len(samples) > 60
    assert {(sample.labels["run"], sample.labels["rank"]) for sample in samples} == {(exported.run.id, rank)}
