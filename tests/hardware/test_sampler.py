"""GpuSampler: exact rows on a fake clock, and everything that may hang, fail or be lost meanwhile."""

import json
import os
import random
import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import pynvml
import pytest
from fake_nvml import (
    FIELD_FUNCTIONS,
    GPM,
    READ_FUNCTIONS,
    READING,
    FakeGpu,
    tick,
)
from quick import first_quick

from tfopt.hardware import GpuSample, GpuSampler, gpu_reader
from tfopt.hardware.host_activity import HostMeter, HostReading
from tfopt.hardware.nvml import driver

HOST = HostReading(
    host_cpu_percent=12.5, host_memory_used_mib=2048.0, process_memory_mib=256.0, disk_read_mib_per_second=8.0
)
ROW = GpuSample(
    time_seconds=1_000.0,
    elapsed_seconds=0.0,
    index=0,
    uuid="GPU-00000000-aaaa-bbbb-cccc-000000000000",
    **vars(READING),
    **vars(HOST),
)
UNKNOWN = dict.fromkeys(FIELD_FUNCTIONS)


class FakeClock:
    """Both clocks: the monotonic one stands `now` after its own zero, the wall clock 900 s further."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def wall(self):
        return self.now + 900.0


@pytest.fixture
def clock(monkeypatch, set_clock):
    monkeypatch.setattr(HostMeter, "read", lambda self: HOST)
    clock = FakeClock()
    set_clock(clock, GpuSampler, gpu_reader.GpuReader, wall=clock.wall)
    return clock


class Driven:
    """A sampler without its thread: `tick()` takes one sample now, and the clock goes on by one interval."""

    def __init__(self, clock, **options):
        self.clock = clock
        self.sampler = GpuSampler(**options)

    def tick(self):
        rows = tick(self.sampler)
        self.clock.now += self.sampler.interval_seconds
        return rows


@pytest.mark.usefixtures("gpu")
def test_rows_are_exact(clock):
    driven = Driven(clock, interval_seconds=0.5)
    assert driven.tick() == (ROW,)
    assert driven.tick() == (replace(ROW, time_seconds=1000.5, elapsed_seconds=0.5),)
    assert driven.sampler.samples[0] == ROW


def test_a_row_is_json(clock, gpu):
    gpu.reasons = pynvml.nvmlClocksEventReasonSwPowerCap
    (row,) = Driven(clock).tick()
    assert row.to_dict()["throttle_reasons"] == ["power_cap"]
    assert json.loads(json.dumps(row.to_dict())) == row.to_dict()
    assert json.loads(json.dumps(GpuSample(0.0, 0.0).to_dict()))["throttle_reasons"] is None


def test_without_a_gpu_the_host_is_sampled(clock, caplog):
    expected = replace(ROW, index=None, uuid=None, **UNKNOWN)
    assert Driven(clock).tick() == (expected,)
    assert not caplog.records


def test_only_visible_gpus_are_read_in_their_order(clock, fake_nvml):
    fake_nvml.gpus += [FakeGpu(uuid=f"GPU-{bus}", bus=bus, temperature=50 + bus) for bus in range(3)]
    rows = Driven(clock, environ={"CUDA_VISIBLE_DEVICES": "2,0"}).tick()
    assert [(row.index, row.uuid, row.gpu_temperature_celsius) for row in rows] == [(0, "GPU-2", 52), (1, "GPU-0", 50)]


def test_keep_bounds_the_samples(clock, fake_nvml):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", bus=1), FakeGpu(uuid="GPU-b", bus=2)]
    driven = Driven(clock, keep=3)
    for _ in range(10):
        driven.tick()
    assert [row.elapsed_seconds for row in driven.sampler.samples] == [7.0, 7.0, 8.0, 8.0, 9.0, 9.0]
    assert [row.uuid for row in driven.sampler.samples[:2]] == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda fake: setattr(fake, "installed", False), "pip install nvidia-ml-py"),
        (lambda fake: fake.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), "no NVIDIA GPU"),
        (lambda fake: fake.fail("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "not loaded"),
        (lambda fake: fake.fail("nvmlInit", pynvml.NVML_ERROR_NO_PERMISSION), "/dev/nvidia"),
    ],
)
def test_no_driver_leaves_the_host_and_one_warning_for_all_samplers(break_it, words, clock, gpu, fake_nvml, caplog):
    break_it(fake_nvml)
    for driven in (Driven(clock), Driven(clock)):
        for _ in range(3):
            assert [(row.index, row.host_cpu_percent) for row in driven.tick()] == [(None, 12.5)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert words in caplog.text
    assert fake_nvml.calls["nvmlInit"] <= 2  # once a sampler: a mismatch is written to the kernel's log every time


@pytest.mark.parametrize("loaded", [False, True])
def test_a_machine_without_a_driver_needs_one_short_line(loaded, clock, fake_nvml, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_reader, "_KERNEL_DRIVER", tmp_path if loaded else tmp_path / "missing")
    fake_nvml.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    Driven(clock).tick()
    (text,) = caplog.messages
    assert text.startswith("Found no NVIDIA GPU: sampling the host alone.")
    assert ("libnvidia-ml.so.1 is missing" in text) == loaded
    assert loaded or len(text) < 60


def test_a_gpu_lost_at_a_sample_turns_unknown_and_the_others_go_on(clock, fake_nvml, caplog):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", bus=1), FakeGpu(uuid="GPU-b", bus=2)]
    fake_nvml.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_GPU_IS_LOST, at=3, gpu=fake_nvml.gpus[0])
    driven = Driven(clock)
    for _ in range(2):
        assert [row.gpu_power_watts for row in driven.tick()] == [686.5, 686.5]
    for _ in range(3):
        lost, other = driven.tick()
        expected = replace(ROW, time_seconds=lost.time_seconds, elapsed_seconds=lost.elapsed_seconds)
        assert lost == replace(expected, uuid="GPU-a", **UNKNOWN)
        assert other == replace(expected, index=1, uuid="GPU-b")
    assert len(caplog.records) == 1
    assert "GPU:0" in caplog.text
    assert "fell off the bus" in caplog.text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetPowerUsage"]
)
def test_every_error_is_survived_with_at_most_one_warning(function, error_codes, clock, fake_nvml, caplog):
    for code in error_codes:
        fake_nvml.fail(function, code, at=1 if function in ("nvmlInit", "nvmlDeviceGetCount") else 2)
        driven = Driven(clock)
        for number in range(3):
            (row,) = driven.tick()
            assert (row.elapsed_seconds, row.host_cpu_percent) == (float(number), 12.5), code
        assert len(caplog.records) <= 1, code


def test_a_hung_reading_leaves_the_host_and_comes_back(clock, fake_nvml, caplog):
    fake_nvml.gpus += [FakeGpu(uuid="GPU-a", bus=1), FakeGpu(uuid="GPU-b", bus=2)]
    driven = Driven(clock, deadline_seconds=1.0)
    driven.tick()
    fake_nvml.hang("nvmlDeviceGetPowerUsage", gpu=fake_nvml.gpus[1])
    assert [row.gpu_power_watts for row in driven.tick()] == [686.5, None]
    assert [row.gpu_power_watts for row in driven.tick()] == [None, None]
    assert [(row.uuid, row.host_cpu_percent) for row in driven.tick()] == [("GPU-a", 12.5), ("GPU-b", 12.5)]
    assert len(caplog.records) == 1
    overdue = _overdue()
    fake_nvml.recover()
    overdue.exception(10)
    driven.sampler._gpus._deadline_seconds = 10.0
    assert [row.gpu_power_watts for row in driven.tick()] == [686.5, 686.5]


def test_a_hung_start_leaves_the_host_and_comes_back(clock, gpu, fake_nvml, caplog):
    fake_nvml.hang("nvmlInit")
    driven = Driven(clock, deadline_seconds=0.05)
    for _ in range(3):
        assert [(row.index, row.host_cpu_percent) for row in driven.tick()] == [(None, 12.5)]
    assert len(caplog.records) == 1
    overdue = _overdue()
    fake_nvml.recover()
    overdue.exception(10)
    driven.sampler._gpus._deadline_seconds = 10.0
    assert [row.uuid for row in driven.tick()] == [gpu.uuid]


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetPowerUsage"])
def test_a_hang_never_holds_the_caller(function, gpu, fake_nvml, monkeypatch):
    """The call returns at the end of the test only: whatever waited for it would be found waiting here."""
    fake_nvml.hang(function)
    monkeypatch.setattr(gpu_reader, "_PROMPT_SECONDS", 3600.0)  # a row would wait that long
    sampler = GpuSampler(0.01, deadline_seconds=3600.0)
    sampler.start()
    assert fake_nvml.hanging.wait(10)
    thread, waits = sampler._thread, []
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda timeout=None: (waits.append(timeout), join(timeout)))
    sampler.close()
    assert waits == [0.5]  # close() promises to return within a second
    join(10)
    assert not thread.is_alive()
    assert not fake_nvml.released.is_set()
    assert {row.gpu_power_watts for row in sampler.samples} <= {None}


def test_a_reading_that_comes_a_little_late_is_the_next_rows(clock, fake_nvml):
    fake_nvml.gpus += [FakeGpu(uuid=f"GPU-{bus}", bus=bus) for bus in range(2)]
    driven = Driven(clock, interval_seconds=0.5, deadline_seconds=0.6)
    driven.tick()
    fake_nvml.hang("nvmlDeviceGetPowerUsage", gpu=fake_nvml.gpus[0])
    assert [row.gpu_power_watts for row in driven.tick()] == [None, None]
    fake_nvml.gpus[1].power_milliwatts = 500_000
    fake_nvml.recover()
    _round(driven.sampler).result(10)
    fake_nvml.released.clear()
    fake_nvml.hang("nvmlDeviceGetUtilizationRates")
    first, second = driven.tick()
    assert (first.gpu_power_watts, second.gpu_power_watts) == (686.5, 500.0)
    assert first.gpu_temperature_celsius == 54


def test_a_sample_that_comes_after_the_close_is_dropped(gpu, fake_nvml):
    fake_nvml.hang("nvmlInit")
    sampler = GpuSampler(0.01)
    sampler.start()
    assert fake_nvml.hanging.wait(10)
    thread = sampler._thread
    sampler.close()
    fake_nvml.recover()
    thread.join(10)
    assert not thread.is_alive()
    assert sampler.samples == ()


def test_close_ends_the_wait_for_the_next_sample(gpu):
    first = threading.Event()
    with GpuSampler(3600.0, on_sample=lambda rows: first.set()) as sampler:
        assert first.wait(20)
        thread = sampler._thread
    thread.join(10)
    assert not thread.is_alive()
    assert [row.uuid for row in sampler.samples] == [gpu.uuid]


def test_the_thread_is_a_daemon_and_close_may_be_called_twice_or_too_early():
    sampler = GpuSampler()
    sampler.close()
    assert sampler.start() is sampler
    thread = sampler._thread
    assert thread.daemon
    assert sampler.start()._thread is thread
    sampler.close()
    sampler.close()


def test_a_second_run_begins_anew(clock, gpu):
    seen = []
    taken = threading.Semaphore(0)

    def on_sample(rows):
        seen.append(rows)
        taken.release()

    sampler = GpuSampler(3600.0, on_sample=on_sample)
    for _ in range(2):
        with sampler:
            assert taken.acquire(timeout=20)
        clock.now += 50.0
    assert sampler.samples == (replace(ROW, time_seconds=1050.0),)
    assert seen == [(ROW,), (replace(ROW, time_seconds=1050.0),)]


def test_on_sample_may_close_its_sampler(gpu, caplog):
    done = threading.Event()

    def on_sample(rows):
        sampler.close()
        done.set()

    sampler = GpuSampler(0.01, on_sample=on_sample)
    sampler.start()
    assert done.wait(20)
    assert len(sampler.samples) == 1
    assert not caplog.records


@pytest.mark.usefixtures("gpu")
def test_an_exception_of_on_sample_is_reported_once_and_survived(clock, caplog):
    calls = []

    def on_sample(rows):
        calls.append(rows)
        raise ZeroDivisionError("of the caller")

    driven = Driven(clock, on_sample=on_sample)
    for _ in range(3):
        driven.tick()
    assert calls == [(row,) for row in driven.sampler.samples]
    assert len(calls) == 3
    assert len(caplog.records) == 1
    assert "of the caller" in caplog.text


def test_a_defect_in_a_sample_is_reported_and_the_thread_goes_on(gpu, monkeypatch, caplog):
    failures = iter([KeyError("a defect"), KeyError("a defect")])

    def read(meter):
        for error in failures:
            raise error
        return HostReading()

    monkeypatch.setattr(HostMeter, "read", read)
    sampled = threading.Event()
    with GpuSampler(0.01, on_sample=lambda rows: sampled.set()):
        assert sampled.wait(20)
    assert len(caplog.records) == 1
    assert "a defect" in caplog.text


def test_the_schedule_does_not_drift(clock, monkeypatch):
    waits = []

    class Ended(threading.Event):
        """Lets the clock pass instead of waiting, and ends after five samples."""

        def wait(self, timeout=None):
            waits.append(timeout)
            clock.now += timeout
            if len(waits) == 5:
                self.set()
            return self.is_set()

    costs = iter([0.25, 0.5, 2.25, 0.0, 0.75])
    sampler = GpuSampler(1.0)
    monkeypatch.setattr(sampler, "_report", lambda rows: setattr(clock, "now", clock.now + next(costs)))
    sampler._run(Ended())
    assert [row.elapsed_seconds for row in sampler.samples] == [0.0, 1.0, 2.0, 5.0, 6.0]
    assert waits == [0.75, 0.5, 0.75, 1.0, 0.25]


@pytest.mark.parametrize("seed", first_quick(range(40), 2))
def test_whatever_befalls_eight_gpus_a_row_holds_the_truth_of_its_time_or_nothing(seed, clock, fake_nvml):
    """GPUs are lost, hang, talk garbage and come back, at random. The truth changes with every row."""
    chance = random.Random(seed)
    fake_nvml.gpus += [FakeGpu(uuid=f"GPU-{bus}", bus=bus, gpm=dict(GPM) if bus % 2 else None) for bus in range(8)]
    driven = Driven(clock)
    driven.tick()
    for number in range(1, 60):
        wrong = {index for index in range(8) if chance.random() < 0.2}
        fake_nvml.now += 1.0
        for index, gpu in enumerate(fake_nvml.gpus):
            gpu.power_milliwatts = 2**32 - 2 if index in wrong else 1000 * (100 + number)
            gpu.utilization = gpu.temperature = 20 + number
            gpu.energy_millijoules += 500_000
        if chance.random() < 0.3:
            fake_nvml.recover()
            _round(driven.sampler).exception(10)
            fake_nvml.released.clear()
        late = chance.random() < 0.1  # what was read meanwhile is of another time
        if late:
            clock.now += 2.0
            for gpu in fake_nvml.gpus:
                gpu.utilization = gpu.temperature = 10 + number
        for gpu in fake_nvml.gpus:
            if chance.random() < 0.05:
                fake_nvml.fail(chance.choice(READ_FUNCTIONS), pynvml.NVML_ERROR_GPU_IS_LOST, gpu=gpu)
        hangs = chance.random() < 0.2
        quiet = not fake_nvml._troubles and _round(driven.sampler).done()
        driven.sampler._gpus._deadline_seconds = 10.0 if quiet and not hangs else 0.02
        if hangs:
            fake_nvml.hang(chance.choice(READ_FUNCTIONS), gpu=chance.choice(fake_nvml.gpus))
        rows = driven.tick()
        assert [row.host_cpu_percent for row in rows] == [12.5] * 8
        for index, row in enumerate(rows):
            assert row.gpu_power_watts in ({None} if index in wrong else {None, 100.0 + number})
            of_now = (10 if late else 20) + number
            assert {row.gpu_temperature_celsius, row.gpu_utilization_percent} <= {None, of_now}
            assert row.gpu_energy_joules in {None, 123_456.789 + 500.0 * number}
            assert row.sm_active_percent in ({None, 95.0} if index % 2 else {None})
            if quiet and not hangs:
                assert row.gpu_temperature_celsius is not None


def _round(sampler):
    """The reading of all GPUs that a sampler waits for."""
    return sampler._gpus._round


def _overdue():
    """The call that hangs now."""
    return driver.door()._worker._overdue


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_samples_while_its_parents_driver_hangs(gpu, fake_nvml):
    fake_nvml.hang("nvmlDeviceGetPowerUsage")
    sampler = GpuSampler(0.01, deadline_seconds=0.05).start()
    assert fake_nvml.hanging.wait(10)
    while driver.door()._worker._overdue is None:
        time.sleep(0.01)
    held, forked = threading.Event(), threading.Event()

    def hold():
        with sampler._lock, driver.door()._worker._lock:
            held.set()
            forked.wait(20)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:
        fake_nvml.released = threading.Event()  # a thread of the parent waits for the other
        fake_nvml.recover()
        read = threading.Event()
        sampler._on_sample = lambda rows: rows[0].gpu_power_watts is not None and read.set()
        threading.Thread(target=lambda: read.wait(20) or os._exit(1), daemon=True).start()
        sampler._deadline_seconds = 10.0
        sampler.start()
        os._exit(0 if read.wait(30) else 1)
    forked.set()
    sampler.close()
    assert os.waitpid(child, 0) == (child, 0)


def test_without_a_thread_for_the_driver_the_host_is_sampled(clock, gpu, monkeypatch, caplog):
    driven = Driven(clock)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert [row.host_cpu_percent for _ in range(2) for row in driven.tick()] == [12.5, 12.5]
    assert len(caplog.records) == 1
    assert [row.uuid for row in driven.tick()] == [gpu.uuid]


def test_two_samplers_share_a_driver_that_hangs(clock, gpu, fake_nvml):
    first, second = Driven(clock, deadline_seconds=0.05), Driven(clock, deadline_seconds=0.05)
    fake_nvml.hang("nvmlDeviceGetPowerUsage")
    before = set(threading.enumerate())
    for driven in (first, second) * 3:
        assert [row.host_cpu_percent for row in driven.tick()] == [12.5]
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["tfopt-nvml"]
    overdue = _overdue()
    fake_nvml.recover()
    overdue.exception(10)
    for driven in (first, second):
        driven.sampler._gpus._deadline_seconds = 10.0
        assert [(row.uuid, row.gpu_power_watts) for row in driven.tick()] == [(gpu.uuid, 686.5)]


@pytest.mark.parametrize("function", ["nvmlDeviceGetCount", "nvmlDeviceGetUtilizationRates"])
def test_an_error_that_is_none_of_nvmls_leaves_the_host(function, clock, gpu, fake_nvml, caplog):
    def fails():
        raise TypeError("no such argument")

    fake_nvml._trouble(function, None, 1, fails)
    driven = Driven(clock)
    rows = [driven.tick()[0] for _ in range(2)]
    assert [row.process_memory_mib for row in rows] == [ROW.process_memory_mib] * 2
    assert {row.gpu_power_watts for row in rows} == {None}
    assert len(caplog.records) == 1
    assert "no such argument" in caplog.text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"interval_seconds": 0}, ValueError),
        ({"deadline_seconds": 0}, ValueError),
        ({"keep": 0}, ValueError),
        ({"keep": 1.5}, TypeError),
        ({"on_sample": 3}, TypeError),
    ],
)
def test_wrong_arguments(options, error):
    (name,) = options
    with pytest.raises(error, match=rf"Expected {name} to be .*Received: "):
        GpuSampler(**options)
