"""docs/callbacks.md: its snippets run, and every key that is logged stands in it with its unit and source."""

import json
import re
from dataclasses import fields

import pytest
from snippets import ROOT, run_snippets

from tfopt.callbacks import loss_scale_logger, precision_monitor, throughput_logger
from tfopt.callbacks.shared.run import COORDINATES
from tfopt.callbacks.utilization_logger import _AVERAGED
from tfopt.hardware import GpuSample

TEXT = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
PEAKS = ("gpu_memory_peak_mib", "throttled_percent", "gpu_energy_joules", "gpu_energy_joules_per_thousand_examples")
KEYS = {
    "Every row": COORDINATES,
    "UtilizationLogger": [*(field.name for field in fields(GpuSample)), *_AVERAGED, *PEAKS],
    "ThroughputLogger": [*throughput_logger._COLUMNS, "first_step_seconds"],
    "LossScaleLogger": loss_scale_logger._COLUMNS,
    "PrecisionMonitor": precision_monitor.KEYS,
    "CompilationLogger": ["xla_compilations", "xla_compilation_seconds"],
}


def listed(logger):
    """Unit and source of each key in the tables of a logger's section, each of which stands there once."""
    section = re.split(r"\n##+ ", TEXT.split(f"\n### {logger}\n")[1])[0]
    found = {}
    for table in re.findall(r"^\| key \| unit \| what, and where .*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE):
        for row in table.splitlines():
            keys, unit, source = (cell.strip() for cell in row.split("|")[1:4])
            for key in re.findall("`(.*?)`", keys):
                assert key not in found, f"{key} is listed twice"
                found[key] = unit, source
    return found


@pytest.mark.parametrize("logger", KEYS)
def test_every_key_is_listed_with_its_unit_and_source(logger):
    found = listed(logger)
    own = set(KEYS[logger]) if logger == "Every row" else set(KEYS[logger]) - set(COORDINATES)
    assert own == set(found)
    assert [key for key, (unit, source) in found.items() if not unit or not source] == []


def test_units_are_those_in_the_names():
    units = {"_percent": "%", "_mib": "MiB", "_ms": "ms", "_watts": "W", "_celsius": "°C", "_mhz": "MHz"}
    units |= {"_mib_per_second": "MiB/s", "_seconds": "s", "_joules": "J"}
    for logger in KEYS:
        for key, (unit, _) in listed(logger).items():
            assert [known for end, known in units.items() if key.endswith(end)] in ([], [unit]), key


def test_what_the_callbacks_cost_is_what_was_recorded():
    figures = json.loads((ROOT / "benchmarks" / "results" / "callbacks-cpu.json").read_text(encoding="utf-8"))[
        "figures"
    ]
    steps = figures["on a step"]
    prose = " ".join(TEXT.partition("\n## Cost\n")[2].split())
    for one in (steps[name]["process"] for name in ("0.5 ms", "5 ms")):
        low, high = (f"{end:.0f}".replace("-", "−") for end in one["interval_us"])
        assert f"{one['longer_us']:.0f} µs [{low}–{high}] of {one['step_us']:.0f} µs" in prose


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("callbacks.md", tmp_path)
    assert "'loss'" in printed  # what the tracker got
    assert {path.name for path in tmp_path.iterdir()} >= {"logs", "report.html", "log.csv", "training.prom"}


def test_those_of_hardware_run(tmp_path):
    assert "989.5" in run_snippets("hardware.md", tmp_path)
