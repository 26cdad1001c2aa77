"""What the GPUs were like in the turns of each variant, on a machine whose readings the test sets."""

import itertools
import time
from functools import partial

import pytest
from fake_nvml import FakeGpu, tick

from tfopt.bench.cases import Case, Variant
from tfopt.bench.conditions import Conditions
from tfopt.measure import StepTimes

TIMES = StepTimes(repeats_ms=((10.0,),), steps_per_sample=1, first_step_seconds=1.0, examples_per_step=50)


@pytest.fixture
def turns(fake_nvml):
    """Plays turns of two seconds: a function gets their readings, a dict for each, and returns the conditions."""

    def play(*readings, gpus=1):
        fake_nvml.gpus.extend(FakeGpu(uuid=f"GPU-{number}", bus=number + 1) for number in range(gpus))
        clock = itertools.count(0.0)  # a second passes between two looks
        conditions = Conditions(clock=lambda: float(next(clock)))

        def timer(reading):
            for gpu in fake_nvml.gpus:
                for name, value in reading.items():
                    setattr(gpu, name, value)
            tick(conditions._sampler)
            return TIMES

        for reading in readings:
            conditions.during("a", partial(timer, reading))()
        return conditions.of("a")

    return play


def test_readings_of_all_turns_but_the_first_count(turns):
    found = turns(
        {"sm_clock": 100, "temperature": 99, "energy_millijoules": 0, "reasons": 0x20},
        {"sm_clock": 1900, "temperature": 60, "energy_millijoules": 1_000_000},
        {"sm_clock": 1400, "temperature": 62, "energy_millijoules": 2_500_000, "reasons": 0x4 | 0x2},
        {"sm_clock": 1800, "temperature": 61, "energy_millijoules": 3_000_000, "reasons": 0},
    )
    assert found["sm_clock_mhz"] == [1400, 1800]
    assert found["gpu_temperature_celsius"] == 62
    assert found["throttle_reasons"] == [
        "power_cap",
        "thermal",
    ]  # the second turn kept the first's; clocks that somebody set are none


def test_a_power_cap_that_hardly_slows_is_none(turns):
    assert turns({}, {"sm_clock": 1900, "reasons": 0x4}, {"sm_clock": 1980, "reasons": 0x4})["throttle_reasons"] == []


def test_power_is_the_energy_over_the_time(turns):
    """Turns from 3 to 5, 6 to 8 and so on; the counter is read in their middle, at 1, 4, 7, … seconds."""
    found = turns(*({"energy_millijoules": 300_000 * number} for number in range(4)))
    # 100 J a second from 1 to 10 s, and nothing known behind: the last turn lasts from 9 to 11.
    assert found["gpu_power_watts"] == pytest.approx((200 + 200 + 100) / 6)


def test_the_power_of_several_gpus_is_added(turns):
    found = turns(*({"energy_millijoules": 300_000 * number} for number in range(4)), gpus=2)
    assert found["gpu_power_watts"] == pytest.approx(2 * 500 / 6)


def test_what_a_gpu_does_not_say_is_unknown(turns):
    unsupported = {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"}
    found = turns({"unsupported": unsupported}, {"no_clocks": {1}})
    assert found["gpu_power_watts"] is None
    assert found["gpu_temperature_celsius"] is None


def test_without_a_gpu_nothing_is_read(fake_nvml):
    with Conditions() as conditions:
        conditions.during("a", lambda: TIMES)()
    assert conditions.of("a") is None


def test_a_case_records_them(fake_nvml, monkeypatch):
    """Through the sampler's own thread."""
    gpu = FakeGpu(reasons=0x40)
    fake_nvml.gpus.append(gpu)
    monkeypatch.setattr("tfopt.bench.conditions._INTERVAL_SECONDS", 0.01)
    seen = []

    def timer():
        due, samples = time.monotonic() + 30, len(seen)
        while len(seen) < samples + 3 and time.monotonic() < due:
            time.sleep(0.01)
            gpu.energy_millijoules += 5000
            seen.append(None)
        return TIMES

    variants = [Variant(name=name, note="", timer=lambda stack: timer) for name in "ab"]
    case = Case(suite="s", workload="w", question="?", unit="step", variants=variants, repeats=4)
    for variant in case.run(lambda name: None)["variants"]:
        assert variant["conditions"]["throttle_reasons"] == ["hw_thermal"]
        watts = variant["conditions"]["gpu_power_watts"]
        assert watts > 0
        assert variant["joules_per_thousand_examples"] == pytest.approx(watts * 1000 / 5000)
