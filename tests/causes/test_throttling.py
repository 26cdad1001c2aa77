import pytest

from tfopt.causes.readings import Throttling
from tfopt.hardware import GpuSample


def row(mhz, *reasons, index=0):
    return GpuSample(0.0, 0.0, index=index, uuid=f"GPU-{index}", sm_clock_mhz=mhz, throttle_reasons=reasons)


def told(*rows):
    throttling = Throttling()
    return [throttling.reasons(one) for one in rows]


def test_the_power_cap_counts_where_it_holds_the_clock_markedly_down():
    assert told(row(1980), row(1485, "power_cap"), row(1484, "power_cap")) == [(), (), ("power_cap",)]
    assert told(row(1484, "power_cap"), row(1484, "power_cap")) == [(), ()], "no higher clock was seen"
    assert told(row(1980), row(None, "power_cap")) == [(), ()], "it is unknown"


def test_each_gpu_has_its_highest_clock():
    assert told(row(1980, index=1), row(1300, "power_cap"), row(1300, "power_cap", index=1)) == [(), (), ("power_cap",)]


@pytest.mark.parametrize("reason", ["thermal", "hw_thermal", "hw_power_brake", "hw_slowdown"])
def test_heat_and_brakes_always_count(reason):
    assert told(row(1980, reason), row(None, "sync_boost", reason)) == [(reason,)] * 2


def test_unknown_and_what_the_owner_has_set():
    assert told(GpuSample(0.0, 0.0, index=0)) == [None]
    assert told(row(1980), row(500, "applications_clocks", "sync_boost", "display_clocks")) == [(), ()]
