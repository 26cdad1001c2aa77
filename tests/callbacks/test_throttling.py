import pytest

from tfopt.callbacks.alerts.running_means import RunningMeans
from tfopt.callbacks.report.recording import Recording
from tfopt.callbacks.throttling import Throttling
from tfopt.callbacks.utilization.epoch_readings import EpochReadings
from tfopt.callbacks.utilization_alert import UtilizationAlert
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


@pytest.mark.parametrize(("mhz", "slowed"), [(1700, False), (1200, True)])
def test_logs_alert_and_report_agree(mhz, slowed):
    rows = [row(1980), *[row(mhz, "power_cap")] * 9]
    logs = EpochReadings(lambda: 0.0)
    report = Recording("net", None, None, lambda: 0.0)
    alert = UtilizationAlert("gpu_power_watts", below=1)
    alert._throttling, alert._means, alert._rules = Throttling(), RunningMeans(), {}
    alert._stepped_at = None
    alert._known = True
    for one in rows:
        logs.add([one])
        report.take_samples((one,))
        alert._take_samples((one,))
    assert logs.values()["throttled_percent"] == (90.0 if slowed else 0.0)
    assert report._timeline.series["slowed_percent"][0].mean() == (90.0 if slowed else 0.0)
    assert alert._means.gpus({})[0].throttle_reasons == (("power_cap",) if slowed else ())
