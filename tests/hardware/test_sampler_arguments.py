"""GpuSampler refuses what it cannot do, by name."""

from typing import Any

import pytest

from tfopt.hardware import GpuSampler


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"interval_seconds": 0}, ValueError),
        ({"interval_seconds": -1.0}, ValueError),
        ({"interval_seconds": float("nan")}, ValueError),
        ({"interval_seconds": float("inf")}, ValueError),
        ({"interval_seconds": "1"}, TypeError),
        ({"interval_seconds": None}, TypeError),
        ({"interval_seconds": True}, TypeError),
        ({"deadline_seconds": 0}, ValueError),
        ({"keep": 0}, ValueError),
        ({"keep": -1}, ValueError),
        ({"keep": 1.5}, TypeError),
        ({"keep": True}, TypeError),
        ({"keep": None}, TypeError),
        ({"on_sample": 3}, TypeError),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception]) -> None:
    (name,) = options
    with pytest.raises(error, match=rf"Expected {name} to be .*Received: "):
        GpuSampler(**options)
