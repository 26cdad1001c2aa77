"""What the GPUs were like in the turns of each variant, on a machine whose readings the test sets."""

import itertools
import time
from dataclasses import replace
from functools import partial

import pytest
from fake_nvml import FakeGpu, tick

from tfopt.bench.cases import Case, Variant
from tfopt.bench.cases.device import GpuReadings
from tfopt.bench.cases.measuring import measure
from tfopt.hardware import GpuSampler
from tfopt.measure import StepTimes

TIMES = StepTimes(repeats_ms=((40.0, 60.0),), steps_per_sample=20, first_step_seconds=1.0, examples_per_step=50)


@pytest.fixture
def turns(fake_nvml, set_clock):
    """Plays turns of two seconds: a function gets their readings, a dict for each, and returns the conditions.

    Turns end at 1, 3, 5, … seconds, and the GPUs are read in their middle.
    """

    def play(*readings, gpus=1, read=1, times=TIMES):
        fake_nvml.gpus.extend(FakeGpu(uuid=f"GPU-{number}", bus=number + 1) for number in range(gpus))
        clock = itertools.count(0.0)  # a second passes between two looks
        set_clock(time.monotonic, GpuReadings, GpuSampler, wall=lambda: float(next(clock)))
        conditions = GpuReadings(read)

        def timer(reading):
            for gpu in fake_nvml.gpus:
                for name, value in reading.items():
                    setattr(gpu, name, value)
            tick(conditions._sampler)
            return times

        for reading in readings:
            conditions.during("a", partial(timer, reading))()
        return conditions.of("a", read)

    return play


def test_readings_of_all_turns_but_the_first_count(turns):
    found = turns(
        {"sm_clock": 100, "temperature": 99, "energy_millijoules": 0, "reasons": 0x20},
        {"sm_clock": 1900, "temperature": 60, "energy_millijoules": 1_000_000},
        {"sm_clock": 1400, "temperature": 62, "energy_millijoules": 2_500_000, "reasons": 0x4 | 0x2},
        {"sm_clock": 1800, "temperature": 61, "energy_millijoules": 3_000_000, "reasons": 0},
    )
    assert found.sm_clock_mhz == (1400, 1800)
    assert found.gpu_temperature_celsius == 62
    assert found.throttle_reasons == (
        "power_cap",
        "thermal",
    )  # the second turn kept the first's; clocks that somebody set are none


def test_a_power_cap_that_hardly_slows_is_none(turns):
    assert turns({}, {"sm_clock": 1900, "reasons": 0x4}, {"sm_clock": 1980, "reasons": 0x4}).throttle_reasons == ()


ENERGIES = [{"energy_millijoules": 300_000 * number} for number in range(4)]


def test_power_is_the_energy_over_the_time(turns):
    # 150 W up to the last reading at 6 s, and nothing known behind it: the last turn ends at 7.
    assert turns(*ENERGIES).gpu_power_watts == pytest.approx((300 + 300 + 150) / 6)


def test_only_the_gpus_that_train_count(turns):
    assert turns(*ENERGIES, gpus=3, read=2).gpu_power_watts == pytest.approx(2 * 750 / 6)


def test_turns_too_short_to_tell_have_no_power(turns):
    short = replace(TIMES, steps_per_sample=3)  # 0.3 s
    found = turns(*ENERGIES, times=short)
    assert found is None  # nor was it read in them
    longer = replace(TIMES, steps_per_sample=11)
    assert turns(*ENERGIES, times=longer).gpu_power_watts is not None


def test_what_a_gpu_does_not_say_is_unknown(turns):
    unsupported = {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"}
    found = turns({"unsupported": unsupported}, {"no_clocks": {1}})
    assert found.gpu_power_watts is None
    assert found.gpu_temperature_celsius is None


def test_without_a_gpu_nothing_is_read(fake_nvml):
    with GpuReadings(1) as conditions:
        conditions.during("a", lambda: TIMES)()
    assert conditions.of("a", 1) is None


def test_where_none_is_to_be_read_none_is(fake_nvml):
    fake_nvml.gpus.append(FakeGpu())
    assert GpuReadings(0)._sampler is None
    assert GpuReadings(1)._sampler is not None


@pytest.mark.slow
def test_a_case_records_them(fake_nvml, monkeypatch):
    """Through the sampler's own thread."""
    gpu = FakeGpu(reasons=0x40)
    fake_nvml.gpus.append(gpu)
    monkeypatch.setattr("tfopt.bench.cases.device._INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr("tfopt.bench.cases.device._SHORTEST", 0.02)

    def timer():
        begin = time.monotonic()
        for _ in range(20):
            time.sleep(0.01)
            gpu.energy_millijoules += 5000
        return StepTimes(
            repeats_ms=((1000 * (time.monotonic() - begin),),),
            steps_per_sample=1,
            first_step_seconds=1.0,
            examples_per_step=50,
        )

    variants = [
        Variant(name=name, note="", timer=lambda stack: timer, gpus=gpus) for name, gpus in (("a", 1), ("b", 0))
    ]
    case = Case(suite="s", workload="w", question="?", unit="step", variants=variants, repeats=4)
    read, unread = measure(case).variants
    assert read.conditions.throttle_reasons == ("hw_thermal",)
    watts = read.conditions.gpu_power_watts
    assert watts > 0
    per_second = read.times.examples_per_second
    assert read.metrics.joules_per_thousand_examples == pytest.approx(watts * 1000 / per_second)
    assert unread.conditions is None
