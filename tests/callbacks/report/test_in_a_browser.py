"""The page of a full record in a browser: nothing is wider than the screen, and no label is on another."""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from clock import Clock

from tfopt.callbacks.report.recorder import Recorder
from tfopt.callbacks.report.training_page import report
from tfopt.callbacks.shared.histogram import Histogram
from tfopt.causes.between_gpus import Replicas
from tfopt.hardware import GpuSample

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt-get install chromium)"),
]
# What is wider than its place, and which labels of a plot overlap.
LOOK = """
const places = [...document.querySelectorAll("html, main > section > .scroll")];
const wide = places.filter(e => e.scrollWidth > e.clientWidth).map(e => e.tagName);
const plots = [...document.querySelectorAll(".plot")];
const over = [];
for (const plot of plots) {
  const labels = [...plot.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
  for (const [one, a] of labels) for (const [other, b] of labels)
    if (one < other && a.left < b.right + 4 && b.left < a.right + 4 && a.top + 4 < b.bottom && b.top + 4 < a.bottom)
      over.push([one, other]);
}
const result = {wide, over, plots: plots.length, width: innerWidth};
document.body.innerHTML = "<pre>" + JSON.stringify(result) + "</pre>";
"""


def page(set_clock):
    clock = Clock()
    set_clock(clock, Recorder)
    throughput = SimpleNamespace(first_step_seconds=21.0, batch_size=1024.0, step_times=Histogram())
    setup = ("AdamW", "mixed_bfloat16", "XLA on", "8 replicas")
    recorder = Recorder("vision_transformer", throughput, None, setup, Replicas(8, 8, "MirroredStrategy"))
    recorder.begin_epoch()
    for second in range(1, 1501):
        clock.now += 1
        host = {"host_cpu_percent": 40.0, "process_memory_mib": 1e4, "disk_read_mib_per_second": 3.0 * second}
        rows = [
            GpuSample(
                *(0.0, 0.0, at, f"GPU-{at}"),
                gpu_utilization_percent=97.0,
                sm_active_percent=80.0 if at == 5 else 55.0,
                dram_active_percent=50.0 + second % 9,
                gpu_memory_used_mib=71_000.0,
                gpu_power_watts=540.0 if at == 5 else 660.0,
                gpu_energy_joules=650.0 * second,
                sm_clock_mhz=1320 if at == 5 else 1980,
                nvlink_rx_mib_per_second=40_000.0 + second,
                nvlink_tx_mib_per_second=40_000.0,
                pcie_rx_mib_per_second=900.0,
                pcie_tx_mib_per_second=300.0,
                throttle_reasons=(),
                **host,
            )
            for at in range(8)
        ]
        recorder.take_samples(tuple(rows))
        pace = {"step_time_ms": 190.0, "examples_per_second": 5260.4, "input_wait_percent": 2.0, "mfu_percent": 39.0}
        throughput.step_times.add([0.19])
        recorder.take_steps({"window_seconds": 1.0, "window_steps": 5, **pace})
        if second % 50 == 0:
            names = ("loss", "sparse_categorical_accuracy", "sparse_top_k_categorical_accuracy", "mean_absolute_error")
            metrics = {prefix + name: 100 / second for name in names for prefix in ("", "val_")}
            recorder.end_epoch(second // 50 - 1, {**metrics, "learning_rate": 1e-3, **pace})
            recorder.begin_epoch()
    recorder.take_alert("Expected step_time_ms to be at most 200. Found 207.1 on average for 30 s.")
    recorder.end()
    environment = {"packages": {"tensorflow": "2.21.0", "keras": "3.15.1"}, "gpus": [{"name": "NVIDIA H100"}] * 8}
    return report(recorder.record(ended=True, interrupted=False, written="now", environment=environment))


@pytest.mark.parametrize("width", [1280, 500])
def test_all_fits_the_screen_and_no_label_is_on_another(tmp_path, width, set_clock):
    file = tmp_path / "page.html"
    markup = re.sub("<meta[^>]*Content-Security-Policy[^>]*>", "", page(set_clock))
    file.write_text(markup.replace("</body>", f"<script>{LOOK}</script></body>"))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},2000",
        f"--user-data-dir={tmp_path}",
    ]
    seen = subprocess.run([BROWSER, *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(re.search("<pre>(.*)</pre>", seen.stdout)[1])
    assert (found["width"], found["plots"]) == (width, 20)
    assert found["over"] == []
    assert "HTML" not in found["wide"]
    assert width < 1280 or found["wide"] == [], "tables that do not fit are scrolled on narrow screens only"
