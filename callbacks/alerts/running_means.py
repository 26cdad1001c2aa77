"""What was read while a metric was beyond its bound, as means."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from tfopt.callbacks.readings import GPU_KEYS
from tfopt.callbacks.throttling import SLOWED_BY
from tfopt.hardware import GpuSample

# A reason that was there for less of the time does not explain the rest of it.
_SEEN = 0.25
# By GPU (None: of the training) and name: sum and count of what is known, and the last one.
Sums: TypeAlias = Mapping[tuple[int | None, str], tuple[float, int, float | None]]


class RunningMeans:
    """Sums up readings, so that their means since any moment are known and none is kept.

    Of what was not read since then, the last reading stands. One thread may add GPUs' readings, another one the
    training's.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int | None, str], tuple[float, int, float | None]] = {}

    def add_gpu(self, row: GpuSample, reasons: tuple[str, ...] | None) -> None:
        """Adds a reading of a GPU, with the reasons of `SLOWED_BY` that slow it down; None: they are unknown."""
        self._add(row.index, {key: getattr(row, key) for key in GPU_KEYS})
        self._add(row.index, {name: None if reasons is None else float(name in reasons) for name in SLOWED_BY})

    def add_throughput(self, row: Mapping[str, Any]) -> None:
        """Adds what `ThroughputLogger` tells."""
        self._add(None, {"input_wait_percent": row.get("input_wait_percent")})

    def moment(self) -> Sums:
        """Returns what tells this moment from others."""
        return dict(self._sums)

    def gpus(self, since: Sums, only: int | None = None) -> tuple[GpuSample, ...]:
        """Returns each GPU's means since a moment; of the throttle reasons, the one that was seen most."""
        now = self.moment()
        indices = dict.fromkeys(index for index, _ in now if index is not None and only in (None, index))
        return tuple(_sample(index, _means(index, now, since)) for index in indices)

    def throughput(self, since: Sums) -> dict[str, float]:
        """Returns the training's means since a moment."""
        return _means(None, self.moment(), since)

    def _add(self, index: int | None, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            total, count, _ = self._sums.get((index, name), (0.0, 0, None))
            if value is None or not math.isfinite(value):
                self._sums[index, name] = total, count, None
            else:
                self._sums[index, name] = total + value, count + 1, value


def _means(of: int | None, now: Sums, since: Sums) -> dict[str, float]:
    means: dict[str, float] = {}
    for (index, name), (total, count, last) in now.items():
        if index == of:
            total_then, count_then, _ = since.get((index, name), (0.0, 0, None))
            if count > count_then:
                means[name] = (total - total_then) / (count - count_then)
            elif last is not None:
                means[name] = last
    return means


def _sample(index: int, means: dict[str, Any]) -> GpuSample:
    shares = {name: means.pop(name) for name in SLOWED_BY if name in means}
    most = max(shares, key=lambda name: shares[name], default="")
    reasons = ((most,) if shares[most] >= _SEEN else ()) if shares else None
    return GpuSample(0.0, 0.0, index=index, throttle_reasons=reasons, **means)
