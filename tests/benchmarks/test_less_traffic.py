"""benchmarks/less_traffic.py: that every way to send less runs. tests/distribute/test_docs.py compares the record."""

import json
import subprocess
import sys
from pathlib import Path

import less_traffic
import pytest

ROOT = Path(less_traffic.__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "less-traffic-cpu.json"


def test_every_way_is_recorded():
    assert list(json.loads(RECORDED.read_text(encoding="utf-8"))["figures"]) == list(less_traffic.arms())


@pytest.mark.campaign
def test_every_way_runs(tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, less_traffic.__file__, results, less_traffic.TINY]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found, recorded = json.loads(results.read_text()), json.loads(RECORDED.read_text(encoding="utf-8"))
    assert list(found["figures"]) == list(recorded["figures"]) == list(less_traffic.arms())
    assert len(ran.stdout.splitlines()) == len(found["figures"])
    for name, one in found["figures"].items():
        assert 0 < one["loss"] < 2.4, name  # the logarithm of ten digits is 2.3
        if name.startswith("LocalSteps"):
            assert one["synchronizations"] == 3  # two rounds of eight steps, and the state
        else:
            assert one["synchronizations"] == 16
            assert one["sent_bytes_per_step"] == recorded["figures"][name]["sent_bytes_per_step"]
