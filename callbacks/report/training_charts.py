"""A training's timeline as charts: which quantities, in which units, with how many lines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tfopt.callbacks.report.timeline import Event, Series, Timeline
from tfopt.page import Line, Marks, Panel, Shade, line_chart

Item = TypeVar("Item")
Rows: TypeAlias = "np.ndarray[Any, Any]"  # of `Series.curve`

# More marks would hide the lines.
_EPOCHS_DRAWN = 20
_EVENTS_DRAWN = 60
# A maximum this many times the 95th percentile would squeeze the other values into a third of the panel.
_SPIKE, _USUAL = 6.0, 0.95
# More lines than this in a panel could not be told apart.
_GPUS_DRAWN = 4


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity on the page."""

    name: str
    """The key in `logs`, or what the page makes of several."""
    title: str
    what: str
    """What its numbers are, for a panel's heading."""
    unit: str
    """After a number."""
    part: float = 1.0
    """One of the page's unit in the key's unit: 1024 for GiB and MiB."""
    top: float | None = None
    """Where the axis ends; None: at the largest value."""
    spikes: bool = False
    """Whether a few values may dwarf the others, as of step times: those are cut off at the axis' end, and the median
    is printed instead of the mean."""
    total: bool = False
    """Whether it adds up over the training: the last value is printed instead of the mean."""
    unless_zero: bool = False
    """Whether it is left out where it is always 0."""

    @property
    def tick_unit(self) -> str:
        """The unit beside the highest tick."""
        return {"examples/s": "/s", "TFLOP/s": "T/s"}.get(self.unit, self.unit)


QUANTITIES = {
    "Pace": (
        Quantity("step_time_ms", "Step time", "median of about a second's steps", "ms", spikes=True),
        Quantity("examples_per_second", "Throughput", "of all replicas", "examples/s"),
        Quantity("input_wait_percent", "Waiting for input", "share of the time", "%", top=100),
        Quantity("mfu_percent", "Model FLOPs utilisation", "of the devices' peak", "%"),
        Quantity("model_tflops_per_second", "Model FLOPs", "of all replicas", "TFLOP/s"),
    ),
    "GPUs": (
        Quantity("gpu_utilization_percent", "GPU utilisation", "time in which any kernel ran", "%", top=100),
        Quantity("sm_active_percent", "Multiprocessors", "share of them at work", "%", top=100),
        Quantity("tensor_active_percent", "Tensor cores", "time in which they worked", "%", top=100),
        Quantity("dram_active_percent", "Memory bandwidth", "share in use", "%", top=100),
        Quantity("gpu_memory_used_mib", "GPU memory", "in use by all processes", "GiB", 1024),
        Quantity("gpu_memory_allocated_mib", "TensorFlow's memory", "in use of what it reserved", "GiB", 1024),
        Quantity("nvlink_mib_per_second", "NVLink", "both directions", "GiB/s", 1024, unless_zero=True),
        Quantity("pcie_mib_per_second", "PCIe", "both directions", "GiB/s", 1024),
        Quantity("gpu_power_watts", "Power", "of a board", "W"),
        Quantity("gpu_energy_kwh", "Energy", "of all GPUs since the first reading", "kWh", total=True),
        Quantity(
            "throttled_percent",
            "Throttled",
            "readings slowed down by heat, power or a brake",
            "%",
            top=100,
            unless_zero=True,
        ),
    ),
    "Host": (
        Quantity("host_cpu_percent", "CPU", "of the CPUs that the process may use", "%", top=100),
        Quantity("host_cpu_throttled_percent", "CPU throttled", "share of the quota's periods", "%", unless_zero=True),
        Quantity("process_memory_mib", "Memory", "of this process", "GiB", 1024),
        Quantity("disk_read_mib_per_second", "Disk reads", "by this process", "MiB/s", unless_zero=True),
        Quantity("host_network_mib_per_second", "Network", "both directions", "MiB/s", unless_zero=True),
    ),
}


def chart(
    timeline: Timeline,
    *,
    seconds: float,
    epoch_ends: Sequence[float],
    since: float = 0.0,
    apart: int | None = None,
    step_time_ms: float | None = None,
) -> str | None:
    """Returns the timeline as one figure, None if it is empty.

    Args:
        timeline: What is drawn.
        seconds: End of the axis.
        epoch_ends: When epochs ended.
        since: From then on count the means and medians that it prints.
        apart: A GPU that is drawn beside the median of all.
        step_time_ms: The median that it prints.
    """
    found = known(timeline)
    if not found:
        return None
    return line_chart(
        [
            _panel(quantity, devices, group, _summary(quantity, devices, since, step_time_ms), apart)
            for group, pairs in found.items()
            for quantity, devices in pairs
        ],
        title="Readings since fit began",
        description=_description(found, since),
        seconds=seconds,
        marks=time_marks(timeline, seconds=seconds, epoch_ends=epoch_ends),
        columns=2,
    )


def time_marks(timeline: Timeline, *, seconds: float, epoch_ends: Sequence[float]) -> list[Marks]:
    """Returns the moments to draw on an axis of time."""
    drawn = thinned(epoch_ends, _EPOCHS_DRAWN)
    every = f"end of every {ordinal(-(-len(epoch_ends) // _EPOCHS_DRAWN))} epoch"
    return [
        Marks("end of an epoch" if len(drawn) == len(epoch_ends) else every, drawn, "division"),
        Marks("compilation", _times(timeline, "compilation", seconds), "note"),
        Marks("alert", _times(timeline, "alert", seconds), "alarm"),
        Marks("hardware error", _times(timeline, "hardware error", seconds), "alarm"),
    ]


Known: TypeAlias = list[tuple[Quantity, Mapping[int | None, Series]]]


def known(timeline: Timeline) -> dict[str, Known]:
    """Returns the quantities with known values by group, each with its series by device."""
    found: dict[str, Known] = {}
    for title, quantities in QUANTITIES.items():
        pairs: Known = [(quantity, timeline.series.get(quantity.name, {})) for quantity in quantities]
        # FLOPs as a share of the peak say more than their number.
        shares = any(quantity.name == "mfu_percent" and devices for quantity, devices in pairs)
        found[title] = [
            (_scaled(quantity, devices), devices)
            for quantity, devices in pairs
            if devices
            and not (shares and quantity.name == "model_tflops_per_second")
            and not (quantity.unless_zero and not any(series.highest > 0 for series in devices.values()))
        ]
    return {title: pairs for title, pairs in found.items() if pairs}


def _description(found: Mapping[str, Known], since: float) -> str:
    gpus = max((len(devices) for _, devices in found.get("GPUs", ())), default=0)
    several = f" The line is the median of {gpus} GPUs." if gpus > _GPUS_DRAWN else ""
    series = [one for pairs in found.values() for _, devices in pairs for one in devices.values()]
    if any(one.merged for one in series):
        several += " Each point is the mean of several readings, and the shade spans them all."
    if since:
        several += " The printed means leave out the first step, which compiles."
    return f"A gap means unknown.{several}"


def _scaled(quantity: Quantity, devices: Mapping[int | None, Series]) -> Quantity:
    """An energy below 1 kWh is shown in Wh."""
    if quantity.unit != "kWh" or max(series.highest for series in devices.values()) >= 1:
        return quantity
    return replace(quantity, unit="Wh", part=0.001)


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Returns at most so many of the items, evenly spaced."""
    return list(items[:: max(1, -(-len(items) // most))])


def number(value: float) -> str:
    """Formats three significant digits, or all before the decimal point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"


def figures(
    quantity: Quantity, devices: Mapping[int | None, Series], since: float
) -> tuple[float | None, float, float]:
    """Returns the mean from then on, the minimum and the maximum over all devices, in the page's unit."""
    means = [mean for series in devices.values() if (mean := series.mean(since)) is not None]
    low = min(series.lowest for series in devices.values())
    high = max(series.highest for series in devices.values())
    return fmean(means) / quantity.part if means else None, low / quantity.part, high / quantity.part


def _values(devices: Mapping[int | None, Series], since: float) -> list[float]:
    curves = [series.curve() for series in devices.values()]
    return sorted(value for at, _, mean, _ in curves for value in mean[at >= since].tolist() if not math.isnan(value))


def _panel(
    quantity: Quantity,
    devices: Mapping[int | None, Series],
    group: str,
    summary: tuple[str, float | None],
    apart: int | None,
) -> Panel:
    in_order = sorted(devices.items(), key=lambda item: -1 if item[0] is None else item[0])
    every = {device: series.curve() for device, series in in_order}
    for rows in every.values():
        rows[1:] /= quantity.part
    together = np.concatenate(list(every.values()), axis=1)
    if len(every) <= _GPUS_DRAWN:
        lines = [_line(device, rows) for device, rows in every.items()]
    else:
        lines = [_median(together), *([_line(apart, every[apart])] if apart in every else [])]
    merged = any(series.merged for series in devices.values())
    shade = _shade(together) if merged or len(every) > _GPUS_DRAWN else None  # otherwise lines show every reading
    return Panel(quantity.title, quantity.what, lines, shade, *summary, quantity.tick_unit, group=group)


def _summary(
    quantity: Quantity, devices: Mapping[int | None, Series], since: float, step_time_ms: float | None
) -> tuple[str, float | None]:
    """A panel's number in words, and where its axis ends."""
    mean, _, highest = figures(quantity, devices, since)
    if quantity.total:
        return with_unit(highest, quantity.unit), quantity.top
    if not quantity.spikes:
        return "" if mean is None else f"mean {with_unit(mean, quantity.unit)}", quantity.top
    texts = [] if step_time_ms is None else [f"median {with_unit(step_time_ms, quantity.unit)}"]
    values, top = _values(devices, since), quantity.top
    usual = values[int(_USUAL * (len(values) - 1))] if values else 0.0
    if highest > _SPIKE * usual > 0:
        texts, top = [*texts, f"highest {with_unit(highest, quantity.unit)}", "beyond the chart"], 2 * usual
    return ", ".join(texts), top


def with_unit(value: float, unit: str) -> str:
    """Formats a number with its unit."""
    return f"{number(value)}\u00a0{unit}"


def _line(device: int | None, rows: Rows) -> Line:
    label = "" if device is None else f"GPU {device}"
    return Line(label, rows[0].tolist(), or_none(rows[2]))


def _median(together: Rows) -> Line:
    """The median of many devices."""
    (at, _, mean, _), starts = _by_time(together)
    known = np.add.reduceat(~np.isnan(mean), starts, dtype=int)  # before the unknown ones
    medians = (mean[starts + np.maximum(known - 1, 0) // 2] + mean[starts + known // 2]) / 2
    return Line("median", at[starts].tolist(), or_none(medians))


def _shade(together: Rows) -> Shade:
    """From the lowest to the highest reading of all devices."""
    (at, low, _, high), starts = _by_time(together)
    edges = np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts)
    return Shade(at[starts].tolist(), *map(or_none, edges))


def _by_time(together: Rows) -> tuple[Rows, Rows]:
    """The points of all devices by time and mean, and where each time begins: devices are sampled together."""
    rows = together[:, np.lexsort((together[2], together[0]))]
    return rows, np.flatnonzero(np.diff(rows[0], prepend=-math.inf))


def or_none(values: Rows) -> list[float | None]:
    """Returns the numbers of an array, None for NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def _times(timeline: Timeline, kind: str, seconds: float) -> list[float]:
    """The times of events; of those too close to be distinguished, the first."""
    events: list[Event] = timeline.events[kind].items if kind in timeline.events else []
    return list({int(_EVENTS_DRAWN * event.at / seconds): event.at for event in reversed(events)}.values())[::-1]


def ordinal(count: int) -> str:
    """Returns "1st", "2nd" and so on."""
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"
