"""benchmarks/torch_pipeline.py says what it needs, and the recorded comparison is whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfopt.bench.results import run_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "torch_pipeline.py"


@pytest.mark.slow
def test_without_torch_the_reason_is_said(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert result.stdout.startswith("Skipped: expected torch. Found: no torch here. Run: pip install")


def test_the_recorded_comparison_is_whole():
    run = run_file.read(ROOT / "benchmarks" / "results" / "peers-pipeline-cpu.json")
    (case,) = run.cases
    assert re.fullmatch(r"PyTorch DataLoader, \d+ workers", case.baseline)
    assert [variant.metrics.verdict for variant in case.variants] == ["baseline", "faster"]
