"""docs/callbacks.md: its snippets run, and every key that is logged stands in it."""

from dataclasses import fields

import pytest
from snippets import ROOT, run_snippets

from tfopt.callbacks import throughput_logger
from tfopt.hardware import GpuSample

TEXT = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
EPOCH_KEYS = ("gpu_memory_peak_mib", "throttled_percent", "gpu_energy_joules_per_thousand_examples")
OTHERS = ("first_step_seconds", "loss_scale", "skipped_steps", "loss_scale_growths", "xla_compilations")


def test_the_snippets_run(tmp_path):
    printed = run_snippets("callbacks.md", tmp_path)
    assert "'loss'" in printed  # what the tracker got
    assert {path.name for path in tmp_path.iterdir()} >= {"logs", "report.html", "log.csv", "training.prom"}


@pytest.mark.parametrize(
    "key", [*(field.name for field in fields(GpuSample)), *throughput_logger._COLUMNS, *EPOCH_KEYS, *OTHERS]
)
def test_every_key_is_listed(key):
    assert f"`{key}`" in TEXT


def test_those_of_hardware_run(tmp_path):
    assert "989.5" in run_snippets("hardware.md", tmp_path)
