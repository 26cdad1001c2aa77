import html
import re
from types import SimpleNamespace

import pytest
from clock import Clock

from tfopt.callbacks.report.recorder import Recorder
from tfopt.callbacks.report.training_charts import QUANTITIES, chart
from tfopt.callbacks.report.training_page import report
from tfopt.callbacks.shared.histogram import Histogram
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS
from tfopt.hardware import GpuSample


@pytest.fixture
def clock(set_clock):
    clock = Clock()
    set_clock(clock, Recorder)
    return clock


@pytest.fixture
def logger():
    """Stands in for a CompilationLogger."""
    return SimpleNamespace(compilations=SimpleNamespace(events=["of the fit before"]))


@pytest.fixture
def throughput():
    """Stands in for a ThroughputLogger."""
    return SimpleNamespace(first_step_seconds=3.0, batch_size=32.0, step_times=Histogram())


@pytest.fixture
def recording(clock, logger, throughput):
    return Recorder("net", throughput, logger, ("Adam",))


def record(recording, **changes):
    state = {"ended": False, "interrupted": False, "written": "now", "environment": {}} | changes
    return recording.record(**state)


def points(timeline, name, device=None):
    return [(point.begin, point.mean) for point in timeline.series[name][device].points]


def test_samples_by_gpu_and_the_host_once(recording, clock):
    host = {"host_cpu_percent": 40.0, "process_memory_mib": 512.0}
    for second in (1, 2):
        clock.now = 1000.0 + second
        recording.take_samples(
            tuple(
                GpuSample(
                    0.0, 0.0, index=index, gpu_power_watts=100.0 * index + second, throttle_reasons=reasons, **host
                )
                for index, reasons in ((0, ("power_cap",)), (1, ("power_cap", "hw_thermal")))
            )
        )
    timeline = record(recording).timeline
    assert points(timeline, "gpu_power_watts", 0) == [(1, 1), (2, 2)]
    assert points(timeline, "gpu_power_watts", 1) == [(1, 101), (2, 102)]
    assert points(timeline, "host_cpu_percent") == [(1, 40), (2, 40)]
    assert points(timeline, "throttled_percent", 0) == [(1, 0), (2, 0)], "at its power cap as it should be"
    assert points(timeline, "throttled_percent", 1) == [(1, 100), (2, 100)]
    assert not timeline.series["sm_active_percent"]


def test_how_it_was_trained(recording):
    recording.take_steps({"mfu_percent": 41.5})
    found = record(recording)
    assert (found.setup, found.batch_size) == (("Adam",), 32.0)
    assert points(found.timeline, "mfu_percent") == [(0, 41.5)]


def test_steps_stand_where_they_were_and_count_for_their_time(recording, clock):
    for now, ago, steps, seconds, wait in ((1001.0, 0.0, 9, 1.0, 0.0), (1019.0, 8.0, 1, 9.0, 100.0)):
        clock.now = now
        row = {"input_wait_percent": wait, "step_time_ms": 1000 * seconds / steps}
        recording.take_steps({**row, "window_steps": steps, "window_seconds": seconds}, ago=ago)
    series = record(recording).timeline.series
    waits = series["input_wait_percent"][None]
    assert [(point.begin, point.end, point.mean) for point in waits.points] == [(0.0, 1.0, 0.0), (2.0, 11.0, 100.0)]
    assert waits.mean() == 90.0
    assert series["step_time_ms"][None].mean() == 1000.0, "10 s of ten steps"


def test_the_median_step_is_that_of_all_steps(recording, throughput):
    """Not of the medians that seconds have: most of these have few and slow steps."""
    assert record(recording).step_time_ms is None
    for steps, seconds in ((1000, 0.001), (1, 1.0), (1, 1.0), (1, 1.0)):
        throughput.step_times.add([seconds], steps)
        recording.take_steps({"step_time_ms": 1000 * seconds, "window_steps": steps, "window_seconds": 1.0})
    assert record(recording).step_time_ms == pytest.approx(1.0)


def test_the_verdict_weighs_windows_by_their_seconds(recording, clock):
    """Three of 27 windows waited, which took 44 % of the time."""
    for seconds, wait in [*[(1.0, 1.0)] * 24, *[(6.25, 100.0)] * 3]:
        clock.now += seconds
        recording.take_steps({"input_wait_percent": wait, "window_steps": 9, "window_seconds": seconds})
    page = html.unescape(report(record(recording))).replace("\u00a0", " ")
    assert "44 % of the time" in page.split('<div class="lead">')[1].split("</div>")[0]
    assert "<dt>Waited for input</dt><dd>44.4 <small>%</small>" in page


def test_without_a_gpu_the_host_alone(recording):
    recording.take_samples((GpuSample(0.0, 0.0, host_cpu_percent=40.0),))
    timeline = record(recording).timeline
    assert [name for name, devices in timeline.series.items() if devices] == ["host_cpu_percent"]


def test_energy_of_all_gpus_since_their_first_readings(recording, clock):
    for second, (first, second_gpu) in enumerate([(1e9, 5e6), (1e9 + 3.6e6, 5e6), (1e9 + 7.2e6, 5e6 + 1.8e6)]):
        clock.now = 1000.0 + second
        rows = (GpuSample(0.0, 0.0, index=0, gpu_energy_joules=first),)
        recording.take_samples((*rows, GpuSample(0.0, 0.0, index=1, gpu_energy_joules=second_gpu)))
    assert points(record(recording).timeline, "gpu_energy_kwh") == [(0, 0), (1, 1.0), (2, 2.5)]
    recording.take_samples((GpuSample(0.0, 0.0, index=0, gpu_energy_joules=1.0), *rows[1:]))
    recording.take_samples((GpuSample(0.0, 0.0, index=0, gpu_energy_joules=9e9), *rows[1:]))
    assert [mean for _, mean in points(record(recording).timeline, "gpu_energy_kwh")[3:]] == [None] * 2, "it went back"


def test_a_page_that_is_written_late_tells_when_the_training_ended(recording, clock):
    clock.now += 50
    recording.end()
    clock.now += 20
    assert record(recording).seconds == 50


def test_a_training_that_hung_when_it_was_interrupted(recording, clock):
    clock.now += 50
    recording.take_steps({"step_time_ms": 10.0})
    clock.now += 20
    found = record(recording, interrupted=True)
    assert (found.seconds, found.idle_seconds) == (50, 20)
    recording.end()
    assert record(recording).idle_seconds == 0


def test_errors_of_gpus_since_fit_began_are_events(recording, clock):
    recording.take_samples((GpuSample(0.0, 0.0, index=1, gpu_ecc_uncorrected_errors=0),))
    assert not record(recording).timeline.events, "of none, nothing is said"
    seen = [(None, 2), (None, None), (79, 2), (79, 5), (None, 5), (79, 5), (13, 6)]
    for at, (xid, ecc) in enumerate(seen):
        clock.now = 1000.0 + at
        row = GpuSample(0.0, 0.0, index=3, gpu_xid=xid, gpu_ecc_uncorrected_errors=ecc)
        recording.take_samples((GpuSample(0.0, 0.0, index=0, gpu_xid=31), row))
    found = [
        (event.at, event.text.split(":")[1]) for event in record(recording).timeline.events["hardware error"].items
    ]
    assert found == [
        (2, "3 reported Xid 79"),
        (3, "3 had 3 memory errors that ECC could not correct"),
        (6, "3 reported Xid 13"),
        (6, "3 had 1 memory error that ECC could not correct"),
    ], "GPU 0's Xid is from before this fit"


def test_traffic_in_both_directions(recording):
    sample = {"pcie_rx_mib_per_second": 900.0, "pcie_tx_mib_per_second": 100.0, "nvlink_rx_mib_per_second": 5.0}
    recording.take_samples((GpuSample(0.0, 0.0, index=0, **sample),))
    timeline = record(recording).timeline
    assert points(timeline, "pcie_mib_per_second", 0) == [(0, 1000)]
    assert not timeline.series["nvlink_mib_per_second"], "one direction alone would look like little"
    both = {"host_network_rx_mib_per_second": 3.0, "host_network_tx_mib_per_second": 4.0}
    recording.take_samples((GpuSample(0.0, 0.0, **both),))
    assert [mean for _, mean in points(record(recording).timeline, "host_network_mib_per_second")] == [7.0]


def test_logs_within_and_at_the_end_of_epochs(recording, clock):
    recording.take_logs(1.0, {"loss": 2.0, "accuracy": 0.1, "step_time_ms": 3.0, "name": "x"})
    recording.take_logs(2.0, {"loss": float("nan"), "accuracy": 0.2})
    clock.now += 3
    recording.end_epoch(0, {"loss": 1.0, "val_loss": 1.5, "accuracy": 0.3})
    learning = record(recording).learning
    assert points(learning, "loss") == [(1, 2.0), (2, None), (3, 1.0)], "a gap where it was no number"
    assert points(learning, "accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert set(learning.series) == {"loss", "accuracy"}
    recording.take_logs(4.0, {f"metric{number}": 1.0 for number in range(1000)})
    assert len(record(recording).learning.series) == 12, "memory stays bounded"


def test_unknown_readings_are_gaps(recording, clock):
    for watts in (500.0, None, 700.0):
        recording.take_samples((GpuSample(0.0, 0.0, index=0, gpu_power_watts=watts),))
        recording.take_steps({"step_time_ms": watts, "examples_per_second": None})
        clock.now += 1
    timeline = record(recording).timeline
    assert points(timeline, "gpu_power_watts", 0) == [(0, 500), (1, None), (2, 700)]
    assert points(timeline, "step_time_ms") == [(0, 500), (1, None), (2, 700)]
    assert not timeline.series["examples_per_second"]


def test_compilations_of_this_fit_from_its_first_epoch_on(recording, clock, logger):
    recording.take_samples((GpuSample(0.0, 0.0),))
    logger.compilations = SimpleNamespace(events=[])
    recording.begin_epoch()
    clock.now += 5
    logger.compilations.events = ["f: 2 s"]
    recording.take_samples((GpuSample(0.0, 0.0),))
    recording.take_samples((GpuSample(0.0, 0.0),))
    clock.now += 5
    logger.compilations.events = ["f: 2 s", "g: 1 s"]
    found = record(recording).timeline.events["compilation"].items
    assert [(event.at, event.text) for event in found] == [(5, "f: 2 s"), (10, "g: 1 s")]


def test_epochs_and_the_end_of_the_first_step(recording, clock):
    assert record(recording).first_step_end is None, "of the fit before"
    clock.now += 10
    recording.begin_epoch()
    clock.now += 20
    logs = {"loss": 1.0}
    recording.end_epoch(4, logs)
    logs["step_time_ms"] = 2.0  # by a callback further back
    found = record(recording)
    assert found.first_step_end == 13.0
    (epoch,) = found.epochs.items
    assert (epoch.number, epoch.begin, epoch.end, epoch.logs) == (5, 10, 30, {"loss": 1.0, "step_time_ms": 2.0})


def test_an_interrupted_training_ends_where_it_was_last_at_work(recording, clock):
    for _ in range(3):
        clock.now += 1
        recording.take_steps({"step_time_ms": 5.0})
    for _ in range(100):
        clock.now += 1
        recording.take_samples((GpuSample(0.0, 0.0, host_cpu_percent=0.0),))
    running, interrupted = record(recording), record(recording, interrupted=True)
    assert (running.seconds, interrupted.seconds) == (103.0, 3.0)
    assert not interrupted.timeline.series["host_cpu_percent"]
    assert len(interrupted.timeline.series["step_time_ms"][None]) == 3


def test_a_record_does_not_grow(recording, clock):
    recording.begin_epoch()
    recording.take_alert("cold")
    before = record(recording)
    recording.take_alert("hot")
    recording.end_epoch(0, {})
    assert before.timeline.events["alert"].count == 1
    assert before.epochs.count == 0


# By quantity: readings, its panel's number, and the end of its axis.
PANELS = {
    "step_time_ms": ({"step_time_ms": 38.5}, "median 38.5 ms", "40 ms"),
    "examples_per_second": ({"examples_per_second": 5260.4}, "mean 5,260 examples/s", "6,000 /s"),
    "input_wait_percent": ({"input_wait_percent": 12.5}, "mean 12.5 %", "100 %"),
    "mfu_percent": ({"mfu_percent": 41.5}, "mean 41.5 %", "60 %"),
    "model_tflops_per_second": ({"model_tflops_per_second": 250.0}, "mean 250 TFLOP/s", "300 T/s"),
    "gpu_utilization_percent": ({"gpu_utilization_percent": 97}, "mean 97.0 %", "100 %"),
    "sm_active_percent": ({"sm_active_percent": 55.5}, "mean 55.5 %", "100 %"),
    "tensor_active_percent": ({"tensor_active_percent": 22.5}, "mean 22.5 %", "100 %"),
    "dram_active_percent": ({"dram_active_percent": 45.5}, "mean 45.5 %", "100 %"),
    "gpu_memory_used_mib": ({"gpu_memory_used_mib": 3 * 1024.0}, "mean 3.00 GiB", "3 GiB"),
    "gpu_memory_allocated_mib": ({"gpu_memory_allocated_mib": 1536.0}, "mean 1.50 GiB", "1.5 GiB"),
    "nvlink_mib_per_second": (
        {"nvlink_rx_mib_per_second": 81_920.0, "nvlink_tx_mib_per_second": 20_480.0},
        "mean 100 GiB/s",
        "100 GiB/s",
    ),
    "pcie_mib_per_second": (
        {"pcie_rx_mib_per_second": 2048.0, "pcie_tx_mib_per_second": 512.0},
        "mean 2.50 GiB/s",
        "3 GiB/s",
    ),
    "gpu_power_watts": ({"gpu_power_watts": 640.0}, "mean 640 W", "800 W"),
    "gpu_energy_kwh": ({"gpu_energy_joules": 1e9}, "2.00 kWh", "2.0 kWh"),
    "throttled_percent": ({"throttle_reasons": ("hw_slowdown",)}, "mean 100 %", "100 %"),
    "host_cpu_percent": ({"host_cpu_percent": 40.0}, "mean 40.0 %", "100 %"),
    "host_cpu_throttled_percent": ({"host_cpu_throttled_percent": 4.0}, "mean 4.00 %", "4 %"),
    "process_memory_mib": ({"process_memory_mib": 14 * 1024.0}, "mean 14.0 GiB", "15 GiB"),
    "disk_read_mib_per_second": ({"disk_read_mib_per_second": 12.5}, "mean 12.5 MiB/s", "15 MiB/s"),
    "host_network_mib_per_second": (
        {"host_network_rx_mib_per_second": 5.0, "host_network_tx_mib_per_second": 2.0},
        "mean 7.00 MiB/s",
        "8 MiB/s",
    ),
}


def test_there_is_a_panel_of_each_quantity():
    assert list(PANELS) == [quantity.name for group in QUANTITIES.values() for quantity in group]


@pytest.mark.parametrize("name", PANELS)
def test_the_readings_of_a_quantity_reach_its_panel(recording, clock, name):
    read, text, top = PANELS[name]
    quantity, group = next((one, title) for title, group in QUANTITIES.items() for one in group if one.name == name)
    for second in range(3):
        clock.now = 1000.0 + second
        if name in THROUGHPUT_KEYS:
            recording.take_steps({"window_seconds": 1.0, "window_steps": 9, **read})
        else:
            used = {key: value + second * 3.6e6 for key, value in read.items() if key == "gpu_energy_joules"}
            recording.take_samples((GpuSample(0.0, 0.0, index=0, uuid="GPU-0", **{**read, **used}),))
    drawn = chart(record(recording).timeline, seconds=3.0, epoch_ends=[], step_time_ms=38.5)
    markup = html.unescape(drawn).replace("\u00a0", " ")
    heading = f"<strong>{quantity.title}</strong> <span>{quantity.what}</span><b>{text}</b>"
    assert re.findall('class="quantity">(.*?)</p>', markup) == [heading]
    assert re.findall('class="group">(.*?)</p>', markup) == [group]
    assert re.findall('x="-8" [^>]*>(.*?)</text>', markup)[-1] == top
