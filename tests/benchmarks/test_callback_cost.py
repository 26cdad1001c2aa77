"""benchmarks/callback_cost.py at tiny sizes: it measures all there is to measure, and writes it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import callback_cost
callback_cost.NETS = {"5 ms": (8, False, 40, 2)}  # the three differ in their numbers and XLA only
callback_cost.WARM_UP, callback_cost.SAMPLER_SECONDS, callback_cost.WEEK_SECONDS, callback_cost.STARTS = 20, 1, 1000, 2
callback_cost.main()
"""
THREADS = {
    *("tfopt-sampler", "tfopt-nvml", "tfopt-fit-watch", "tfopt-tracker", "tfopt-report"),
    *("tfopt-alert-action", "tfopt-utilization-log", "tfopt-throughput-log", "tfopt-loss_scale-log", "tfopt-textfile"),
}


@pytest.mark.slow
def test_the_script_measures_all_and_writes(tmp_path):
    results = tmp_path / "results.json"
    subprocess.run([sys.executable, "-c", TINY, BENCHMARKS, results], check=True, capture_output=True)
    figures = json.loads(results.read_text())["figures"]
    assert list(figures["on a step"]) == ["5 ms"]
    for net in figures["on a step"].values():
        callbacks = set(net["hooks_us"])
        assert len(callbacks) == 9
        assert set(net["hooks_mean_us"]) == set(net["closing_ms"]) == callbacks
        assert set(net["threads_us"]) == THREADS
        assert all(len(net[clock]["fits_us"]["with"]) == 2 for clock in ("wall", "training thread", "process"))
    assert figures["sampler_percent_of_a_core"] > 0
    assert {"week_mib", "import_ms", "threads_left"} < set(figures)
