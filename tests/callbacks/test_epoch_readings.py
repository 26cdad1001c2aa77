import pytest
from clock import Clock

from tfopt.callbacks.utilization_logger import EpochReadings, MeanPower
from tfopt.hardware import GpuSample


@pytest.fixture
def clock(set_clock):
    clock = Clock(0.0)
    set_clock(clock, EpochReadings)
    return clock


def row(elapsed=0.0, index=0, **fields):
    return GpuSample(0.0, elapsed, index, f"GPU-{index}", **fields)


def test_means_are_over_readings_and_gpus(clock):
    readings = EpochReadings()
    readings.start()
    readings.add([row(sm_active_percent=10.0), row(index=1, sm_active_percent=20.0)])
    readings.add([row(sm_active_percent=30.0), row(index=1)])
    assert readings.values() == {"sm_active_percent": 20.0}


def test_a_late_sample_counts_for_all_the_time_since_the_previous_one(clock):
    readings = EpochReadings()
    readings.start()
    for elapsed, percent in ((1.0, 0.0), (2.0, 0.0), (10.0, 100.0)):
        gpus = [row(elapsed, index, sm_active_percent=percent + index) for index in (0, 1)]
        readings.add(gpus)
    assert readings.values()["sm_active_percent"] == 80.5
    readings.start()
    readings.add([row(14.0, sm_active_percent=30.0, throttle_reasons=("thermal",)), row(14.0, 1)])
    readings.add([row(15.0, sm_active_percent=80.0, throttle_reasons=())])
    assert readings.values() == {"sm_active_percent": 40.0, "throttled_percent": 80.0}


def test_the_peak_is_of_one_gpu(clock):
    readings = EpochReadings()
    readings.start()
    for used in (1000.0, 9000.0, 2000.0):
        readings.add([row(gpu_memory_used_mib=used), row(index=1, gpu_memory_used_mib=500.0)])
    assert readings.values()["gpu_memory_peak_mib"] == 9000.0
    readings.start()
    assert readings.values()["gpu_memory_peak_mib"] == 2000.0  # of the last reading
    readings.add([row(gpu_memory_used_mib=10.0)])
    assert readings.values()["gpu_memory_peak_mib"] == 10.0


@pytest.mark.parametrize(
    ("reasons", "percent"),
    [
        ([(), ("power_cap",), ("hw_thermal", "sync_boost"), ("applications_clocks",)], 25.0),
        ([()], 0.0),
        ([None, ("thermal",)], 100.0),
        ([None], None),
    ],
)
def test_throttled_is_the_share_of_readings_with_a_reason_that_slows(clock, reasons, percent):
    readings = EpochReadings()
    readings.start()
    for one in reasons:
        readings.add([row(throttle_reasons=one)])
    assert readings.values().get("throttled_percent") == percent


def test_energy_is_mean_power_times_the_epochs_duration(clock):
    readings = EpochReadings()
    readings.add([row(0.5, gpu_energy_joules=1000.0), row(0.5, 1, gpu_power_watts=100.0)])
    clock.now = 1.0
    readings.start()
    readings.add([row(10.5, gpu_energy_joules=4000.0), row(10.5, 1, gpu_power_watts=300.0)])
    clock.now = 21.0
    assert readings.values()["gpu_energy_joules"] == (300 + 200) * 20.0


@pytest.mark.parametrize("last", [{"gpu_energy_joules": 1.0}, {}])
def test_energy_is_absent_where_one_gpus_is_unknown(clock, last):
    readings = EpochReadings()
    readings.start()
    readings.add([row(gpu_energy_joules=100.0), row(0.0, 1, gpu_energy_joules=100.0)])
    readings.add([row(1.0, gpu_energy_joules=200.0), row(1.0, 1, **last)])
    clock.now = 1.0
    assert "gpu_energy_joules" not in readings.values()


def test_what_is_not_finite_or_unknown_is_left_out(clock):
    readings = EpochReadings()
    assert readings.values() == {}
    readings.add([row(gpu_power_watts=None, sm_active_percent=float("nan"), dram_active_percent=float("inf"))])
    assert readings.values() == {}


def test_the_host_alone_has_no_energy(clock):
    readings = EpochReadings()
    readings.add([GpuSample(0.0, 0.0, host_cpu_percent=50.0, disk_read_mib_per_second=2.0)])
    assert readings.values() == {"host_cpu_percent": 50.0, "disk_read_mib_per_second": 2.0}


def mean(*readings, start_after=0):
    power = MeanPower()
    for number, (elapsed, joules, watts) in enumerate(readings):
        if number == start_after:
            power.start()
        power.add(elapsed, joules=joules, watts=watts)
    return power.watts()


def test_it_starts_from_the_last_reading_before():
    assert mean((0.0, 0.0, 1.0), (10.0, 1000.0, 1.0), (12.0, 2000.0, 1.0), start_after=2) == 500.0


def test_without_a_counter_power_is_integrated():
    assert mean((0.0, None, 100.0), (1.0, None, 300.0), (4.0, None, 300.0)) == (200 + 900) / 4


def test_a_gap_in_the_power_readings_is_left_out():
    assert (
        mean((0.0, None, 100.0), (1.0, None, 100.0), (2.0, None, None), (9.0, None, 500.0), (10.0, None, 500.0)) == 300
    )


def test_a_gap_in_the_counters_readings_does_no_harm():
    assert mean((0.0, 0.0, None), (5.0, None, 9.0), (10.0, 2000.0, None)) == 200.0


def test_without_a_second_reading_it_is_the_last_power():
    assert mean((0.0, 1000.0, 250.0)) == 250.0
    assert mean((0.0, 1000.0, 250.0), (1.0, 1250.0, 400.0), start_after=2) == 250.0


def test_a_stopped_start_takes_the_last_power():
    power = MeanPower()
    power.add(0.0, joules=0.0, watts=100.0)
    power.add(1.0, joules=300.0, watts=400.0)
    power.start()
    assert power.watts() == 400.0


@pytest.mark.parametrize(
    "readings",
    [
        [],
        [(0.0, None, None)],
        [(0.0, 1000.0, 300.0), (1.0, 0.0, 300.0)],  # the driver was reloaded
        [(0.0, 1000.0, 300.0), (1.0, 0.0, 300.0), (2.0, 5000.0, 300.0)],
        [(0.0, 1000.0, 300.0), (1.0, 1300.0, 300.0), (2.0, None, None)],  # the GPU is lost
    ],
)
def test_unknown(readings):
    assert mean(*readings) is None


def test_a_counter_that_went_back_counts_again_from_the_next_start():
    power = MeanPower()
    for elapsed, joules in ((0.0, 1000.0), (1.0, 0.0)):
        power.add(elapsed, joules=joules, watts=None)
    power.start()
    power.add(3.0, joules=600.0, watts=None)
    assert power.watts() == 300.0
