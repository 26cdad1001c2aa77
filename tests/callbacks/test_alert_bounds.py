import pytest

from tfopt.callbacks.alert.bounds import Bound, make_bound


@pytest.mark.parametrize(
    ("metric", "value", "above", "margin"),
    [
        ("gpu_utilization_percent", 50.0, False, 5.0),
        ("gpu_utilization_percent", 95.0, False, 2.5),
        ("gpu_utilization_percent", 100.0, False, 0.0),
        ("host_cpu_percent", 90.0, True, 9.0),
        ("host_cpu_percent", 0.0, True, 0.0),
        ("step_time_ms", 200.0, True, 20.0),
        ("gpu_memory_used_mib", 80_000.0, True, 8_000.0),
    ],
)
def test_margin(metric, value, above, margin):
    assert Bound(metric, value, above).margin == margin


def test_bounds_in_words():
    assert str(make_bound("step_time_ms", None, 200)) == "at most 200"
    assert str(make_bound("gpu_utilization_percent", 12.5, None)) == "at least 12.5"
    assert str(make_bound("gpu_memory_used_mib", None, 140_000)) == "at most 140,000"
    assert str(make_bound("tokens_per_second", 2e6, None)) == "at least 2,000,000"
