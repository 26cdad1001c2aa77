import csv
import itertools
import json
import math
import time

import keras
import pytest
from fake_nvml import GPM, FakeGpu
from sampled_fits import INTERVAL, Slow, driven, lines
from watched_fit import fit, net

from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.hardware import GpuSampler, sampler
from tfopt.hardware.gpu_memory import AllocatorReading
from tfopt.hardware.gpu_reader import GpuReader
from tfopt.hardware.host_activity import HostMeter
from tfopt.hardware.nvml import driver

STEPS, EXAMPLES = 4, 16  # of an epoch


def test_epoch_means_and_rows(tmp_path, fake_nvml):
    fake_nvml.gpus += [
        FakeGpu(uuid="GPU-a", utilization=90, power_milliwatts=600_000, memory_used=1024 * 2**20),
        FakeGpu(uuid="GPU-b", bus=2, utilization=70, power_milliwatts=400_000, memory_used=3072 * 2**20, reasons=0x20),
    ]
    logger = UtilizationLogger(tmp_path, INTERVAL)
    history = fit(logger, Slow(logger), epochs=2).history
    assert history["gpu_utilization_percent"] == [80.0, 80.0]
    assert history["gpu_power_watts"] == pytest.approx([500.0, 500.0])
    assert history["gpu_memory_used_mib"] == [2048.0, 2048.0]
    assert history["gpu_memory_process_mib"] == pytest.approx([900.0, 900.0])
    assert history["gpu_memory_peak_mib"] == [3072.0, 3072.0]
    assert history["throttled_percent"] == [50.0, 50.0]
    assert history["host_memory_used_mib"][0] > 0
    with open(tmp_path / "utilization.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["index"], row["uuid"], row["gpu_utilization_percent"]) for row in rows} == {
        ("0", "GPU-a", "90"),
        ("1", "GPU-b", "70"),
    }
    assert len(rows) >= 2 * 3 * 2  # epochs, samples in each, GPUs
    assert [row["uuid"] for row in lines(tmp_path / "utilization.jsonl")] == [row["uuid"] for row in rows]


def test_what_tensorflow_uses_of_each_gpu(tmp_path, fake_nvml, monkeypatch):
    monkeypatch.setattr(sampler, "read_allocator", lambda gpu: AllocatorReading(100.0 + gpu, 300.0 - gpu))
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", bus=2)]
    logs = driven(UtilizationLogger(tmp_path, INTERVAL))
    assert (logs["gpu_memory_allocated_mib"], logs["gpu_memory_allocated_peak_mib"]) == (100.5, 300.0)
    rows = lines(tmp_path / "utilization.jsonl")[:2]
    assert [(row["gpu_memory_allocated_mib"], row["gpu_memory_allocated_peak_mib"]) for row in rows] == [
        (100.0, 300.0),
        (101.0, 299.0),
    ]


def test_limits_counters_and_codes_are_in_rows_and_not_averaged(tmp_path, fake_nvml):
    gpu = FakeGpu(power_limit_milliwatts=450_000, ecc_errors=2)
    fake_nvml.gpus.append(gpu)
    logger = UtilizationLogger(tmp_path, INTERVAL, formats=("jsonl",))
    take = logger._take

    def take_and_tell(rows):
        take(rows)
        fake_nvml.tell(gpu, 31)

    logger._take = take_and_tell
    logs = driven(logger, samples=5)
    row = lines(tmp_path / "utilization.jsonl")[-1]
    told = {"gpu_power_limit_watts": 450.0, "gpu_ecc_uncorrected_errors": 2, "gpu_xid": 31}
    assert {name: row[name] for name in told} == told
    assert not told.keys() & logs.keys()


def test_all_that_the_performance_monitor_says(fake_nvml, monkeypatch):
    fake_nvml.gpus.append(FakeGpu(gpm=GPM))
    seconds = itertools.count()  # GPM's readings are taken anew when some time has gone by
    monkeypatch.setattr(driver, "_door", driver.Nvml(load=fake_nvml.load, clock=lambda: float(next(seconds))))
    logs = driven(UtilizationLogger(interval_seconds=INTERVAL), samples=3)
    assert (logs["sm_active_percent"], logs["sm_occupancy_percent"]) == (95.0, 14.0)
    assert (logs["tensor_active_percent"], logs["dram_active_percent"]) == (92.0, 16.0)
    assert {"nvlink_rx_mib_per_second", "nvlink_tx_mib_per_second", "pcie_rx_mib_per_second"} <= set(logs)
    assert all(math.isfinite(value) for value in logs.values())
    assert "throttle_reasons" not in logs


class Burning(FakeGpu):
    """Draws 300 W by its energy counter, whatever the power reading says."""

    clock = staticmethod(lambda: 0.0)

    @property
    def energy_millijoules(self):
        return int(300_000 * self.clock())

    @energy_millijoules.setter
    def energy_millijoules(self, value):
        pass


def test_energy_of_an_epoch_and_of_a_thousand_examples(fake_nvml, monkeypatch, set_clock):
    now, jump = [0.0], itertools.cycle([0, 3600, -3600])  # of the wall clock, in seconds
    reading = (UtilizationLogger, HostMeter, GpuSampler, GpuReader)
    set_clock(lambda: now[0], *reading, wall=lambda: 1e9 + next(jump))
    monkeypatch.setattr(Burning, "clock", staticmethod(lambda: now[0]))
    fake_nvml.gpus += [Burning(uuid="GPU-a"), Burning(uuid="GPU-b", bus=2)]
    logger = UtilizationLogger(interval_seconds=INTERVAL)

    class TenSeconds(Slow):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 0:
                self.wait()

        def on_train_batch_end(self, step, logs=None):
            if step == 0:
                now[0] += 10
                self.wait()

    history = fit(logger, TenSeconds(logger, samples=2), epochs=3).history
    assert history["gpu_energy_joules"] == [2 * 300 * 10.0] * 3
    assert history["gpu_energy_joules_per_thousand_examples"] == [6000 / EXAMPLES * 1000] * 3


def test_without_a_gpu_the_host_is_logged(tmp_path, fake_nvml):
    logs = driven(UtilizationLogger(tmp_path, INTERVAL, formats=("jsonl",)))
    assert not [key for key in logs if key.startswith("gpu") or key == "throttled_percent"]
    assert logs["host_memory_used_mib"] > 0
    row = lines(tmp_path / "utilization.jsonl")[0]
    assert (row["uuid"], row["gpu_utilization_percent"]) == (None, None)
    assert not (tmp_path / "utilization.csv").exists()


class FirstEpochOnly(Slow):
    def on_train_batch_end(self, step, logs=None):
        if self.samples:
            self.samples -= 1
            self.taken.acquire()


def test_a_short_epoch_repeats_the_last_reading(fake_nvml):
    fake_nvml.gpus.append(FakeGpu(utilization=55))
    logger = UtilizationLogger(interval_seconds=3600)
    history = fit(logger, FirstEpochOnly(logger, samples=1), epochs=3).history
    assert history["gpu_utilization_percent"] == [55.0] * 3
    assert history["gpu_memory_peak_mib"] == [1024.0] * 3
    assert len(history["gpu_energy_joules"]) == 3
    # Rates are there in the first, too, in which there was but one sample.
    assert [len(history[key]) for key in ("host_cpu_percent", "disk_read_mib_per_second")] == [3, 3]


def test_means_begin_anew_with_each_epoch(fake_nvml):
    gpu = FakeGpu(utilization=10)
    fake_nvml.gpus.append(gpu)

    class Busier(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            gpu.utilization = 90

    logger = UtilizationLogger(interval_seconds=INTERVAL)
    history = fit(logger, Slow(logger, samples=4), Busier(), epochs=2).history
    first, second = history["gpu_utilization_percent"]
    assert first == 10.0
    assert second > 50.0  # one sample at most was under way when the load changed


def test_the_next_fit_does_not_begin_with_the_last_ones_readings(fake_nvml):
    fake_nvml.gpus.append(FakeGpu())
    logger = UtilizationLogger(interval_seconds=INTERVAL)
    assert "gpu_power_watts" in driven(logger)
    fake_nvml.gpus.clear()
    assert not [key for key in driven(logger) if key.startswith("gpu")]


def test_curves_stand_over_the_training_step(tmp_path, fake_nvml):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", utilization=90), FakeGpu(uuid="GPU-b", bus=2, utilization=70)]
    logger = UtilizationLogger(tmp_path, INTERVAL, formats=("tensorboard",))
    slow, model = Slow(logger), net()
    for epochs in (2, 1):
        fit(logger, slow, model=model, epochs=epochs)
    seen = events.EventAccumulator(str(tmp_path / "utilization")).Reload()
    curves = {name: seen.Scalars(name) for name in seen.Tags()["scalars"]}
    assert {point.value for point in curves["gpu0/gpu_utilization_percent"]} == {90.0}
    assert {point.value for point in curves["gpu1/gpu_utilization_percent"]} == {70.0}
    assert len(curves["host/host_memory_used_mib"]) == len(curves["gpu0/gpu_power_watts"])
    assert {name.split("/")[0] for name in curves} == {"gpu0", "gpu1", "host"}
    assert not [name for name in curves if "reasons" in name or "index" in name]
    steps = {point.step for point in curves["gpu1/gpu_power_watts"]}
    assert {1, STEPS + 1, 2 * STEPS + 1} <= steps  # after which Slow waits: the first step of each epoch
    assert max(steps) <= 3 * STEPS
    points = curves["gpu0/gpu_power_watts"]
    assert [point.step for point in points] == sorted(point.step for point in points)  # the second fit goes on
    assert abs(curves["gpu0/gpu_power_watts"][0].wall_time - time.time()) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["utilization"]


def test_after_a_restored_backup_the_curves_go_on_from_its_step(tmp_path, fake_nvml):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Restores(keras.callbacks.Callback):  # as BackupAndRestore does
        def on_train_begin(self, logs=None):
            self.model.optimizer.iterations.assign(40)

    logger = UtilizationLogger(tmp_path, INTERVAL, formats=("tensorboard",))
    fit(logger, Restores(), Slow(logger), model=net())
    seen = events.EventAccumulator(str(tmp_path / "utilization")).Reload()
    assert 41 in {point.step for point in seen.Scalars("host/process_memory_mib")}


def cluster(index, workers=2):
    addresses = [f"127.0.0.1:{port}" for port in range(workers)]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def test_each_worker_has_its_own_files_and_the_chief_merges_summaries(tmp_path, fake_nvml, monkeypatch):
    for index, watts in ((1, 300), (0, 100)):
        fake_nvml.gpus[:] = [FakeGpu(uuid=f"GPU-{index}", power_milliwatts=watts * 1000)]
        monkeypatch.setenv("TF_CONFIG", cluster(index))
        driven(UtilizationLogger(tmp_path, INTERVAL, formats=("jsonl",)))
    assert lines(tmp_path / "utilization-worker1.jsonl")[0]["uuid"] == "GPU-1"
    assert lines(tmp_path / "utilization-worker0.jsonl")[0]["uuid"] == "GPU-0"
    merged = json.loads((tmp_path / "utilization-summary.json").read_text())
    assert merged["overall"]["gpu_power_watts"] == {"mean": 200.0, "min": 100.0, "max": 300.0}
    assert (merged["missing"], merged["stale"], merged["gpus"]) == ([], [], 2)


def test_alone_there_is_no_summary(tmp_path, fake_nvml, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", cluster(0, workers=1))
    driven(UtilizationLogger(tmp_path, INTERVAL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["utilization.csv", "utilization.jsonl"]
