"""A training's timeline as charts: which quantities, in which units, with how many lines."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import TypeVar

from tfopt.callbacks.report.timeline import Event, Point, Series, Timeline
from tfopt.page import MOST_LINES, Line, Marks, Panel, Shade, line_chart

Item = TypeVar("Item")

# More marks would hide the lines.
_EPOCHS_DRAWN = 30
_EVENTS_DRAWN = 60
# A maximum this many times the 95th percentile would squeeze the other values into a third of the panel.
_SPIKE, _USUAL = 6.0, 0.95


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity on the page."""

    name: str
    """The key in `logs`."""
    title: str
    unit: str
    """What its numbers are, for a panel's heading."""
    short: str
    """The unit after a number."""
    part: float = 1.0
    """One of the page's unit in the key's unit: 1024 for GiB and MiB."""
    top: float | None = None
    """Where the axis ends; None: at the largest value."""
    spikes: bool = False
    """Whether a few values may dwarf the others: those are cut off at the axis' end, and the median is printed instead
    of the mean."""


QUANTITIES = (
    Quantity("gpu_utilization_percent", "GPU utilisation", "% of the time in which any kernel ran", "%", top=100),
    Quantity("sm_active_percent", "Multiprocessors", "% of them busy, on average", "%", top=100),
    Quantity("tensor_active_percent", "Tensor cores", "% of the time in which they worked", "%", top=100),
    Quantity("step_time_ms", "Step time", "ms, median of about a second's steps", "ms", spikes=True),
    Quantity("examples_per_second", "Throughput", "examples/s", "examples/s"),
    Quantity("input_wait_percent", "Waiting for input", "% of the time", "%", top=100),
    Quantity("gpu_memory_used_mib", "GPU memory", "GiB, of all processes", "GiB", 1024),
    Quantity("gpu_power_watts", "GPU power", "W", "W"),
    Quantity("host_cpu_percent", "Host CPU", "% of the CPUs that the process may use", "%", top=100),
    Quantity("process_memory_mib", "Host memory", "GiB, of this process", "GiB", 1024),
)


def chart(timeline: Timeline, *, seconds: float, epoch_ends: Sequence[float]) -> str | None:
    """Returns the timeline as one figure that ends at `seconds`, None if it is empty."""
    panels = [_panel(quantity, devices) for quantity, devices in known(timeline)]
    if not panels:
        return None
    drawn = thinned(epoch_ends, _EPOCHS_DRAWN)
    every = f"end of every {ordinal(-(-len(epoch_ends) // _EPOCHS_DRAWN))} epoch"
    marks = [
        Marks("end of an epoch" if len(drawn) == len(epoch_ends) else every, drawn, "division"),
        Marks("compilation", _times(timeline, "compilation", seconds), "note"),
        Marks("alert", _times(timeline, "alert", seconds), "alarm"),
    ]
    return line_chart(
        panels,
        title="Readings from the beginning of fit",
        description="A gap in a line means unknown. In a long training, several readings are drawn as their mean; the "
        "shade behind it spans from the lowest to the highest.",
        seconds=seconds,
        marks=marks,
    )


def known(timeline: Timeline) -> list[tuple[Quantity, Mapping[int | None, Series]]]:
    """Returns the quantities with known values, each with its series by device."""
    pairs = [(quantity, timeline.series.get(quantity.name, {})) for quantity in QUANTITIES]
    return [pair for pair in pairs if pair[1]]


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Returns at most so many of the items, evenly spaced."""
    return list(items[:: max(1, -(-len(items) // most))])


def number(value: float) -> str:
    """Formats three significant digits, or all before the decimal point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def figures(quantity: Quantity, devices: Mapping[int | None, Series]) -> tuple[float, float, float]:
    """Returns mean, minimum and maximum over all devices, in the page's unit."""
    means = [mean for series in devices.values() if (mean := series.mean()) is not None]
    low = min(series.lowest for series in devices.values())
    high = max(series.highest for series in devices.values())
    return fmean(means) / quantity.part, low / quantity.part, high / quantity.part


def _panel(quantity: Quantity, devices: Mapping[int | None, Series]) -> Panel:
    in_order = sorted(devices.items(), key=lambda item: -1 if item[0] is None else item[0])
    every = {device: _points(series, quantity) for device, series in in_order}
    shade = _shade(every.values())
    unit = quantity.unit
    if len(every) <= MOST_LINES:
        lines = [_line(device, points) for device, points in every.items()]
    else:
        lines = [_median(every.values())]
        unit = f"{unit}; median of {len(every)} GPUs"
    mean, _, highest = figures(quantity, devices)
    if not quantity.spikes:
        text = f"mean {_with_unit(mean, quantity)}"
        return Panel(quantity.title, unit, lines, shade, text, quantity.top)
    values = sorted(value for line in lines for value in line.values if value is not None)
    text, top = f"median {_with_unit(median(values), quantity)}", None
    usual = values[int(_USUAL * (len(values) - 1))]
    if highest > _SPIKE * usual > 0:
        text, top = f"{text}, highest {_with_unit(highest, quantity)}, beyond the chart", 2 * usual
    return Panel(quantity.title, unit, lines, shade, text, top)


def _with_unit(value: float, quantity: Quantity) -> str:
    return f"{number(value)}\u00a0{quantity.short}"


def _points(series: Series, quantity: Quantity) -> list[Point]:
    """A series' points in the page's unit."""
    part = quantity.part
    return [
        point
        if point.low is None or point.mean is None or point.high is None
        else point._replace(low=point.low / part, mean=point.mean / part, high=point.high / part)
        for point in series.points_with_pauses()
    ]


def _line(device: int | None, points: Sequence[Point]) -> Line:
    label = "" if device is None else f"GPU {device}"
    return Line(label, [_middle(point) for point in points], [point.mean for point in points])


def _median(devices: Iterable[Sequence[Point]]) -> Line:
    """The median of many devices."""
    moments = _moments(devices)
    means = [[point.mean for point in points if point.mean is not None] for _, points in moments]
    return Line("", [at for at, _ in moments], [median(known) if known else None for known in means])


def _shade(devices: Collection[Sequence[Point]]) -> Shade | None:
    """From the lowest to the highest reading of all devices; None if the lines show every reading."""
    if len(devices) <= MOST_LINES and all(point.known <= 1 for points in devices for point in points):
        return None
    moments = _moments(devices)
    lows = [[point.low for point in points if point.low is not None] for _, points in moments]
    highs = [[point.high for point in points if point.high is not None] for _, points in moments]
    return Shade(
        [at for at, _ in moments],
        [min(known) if known else None for known in lows],
        [max(known) if known else None for known in highs],
    )


def _moments(devices: Iterable[Sequence[Point]]) -> list[tuple[float, list[Point]]]:
    """The points of all devices by time. Devices are sampled together, so their points coincide."""
    points = sorted((point for points in devices for point in points), key=_middle)
    return [(at, list(together)) for at, together in groupby(points, _middle)]


def _middle(point: Point) -> float:
    return (point.begin + point.end) / 2


def _times(timeline: Timeline, kind: str, seconds: float) -> list[float]:
    """The times of events; of those too close to be distinguished, the first."""
    events: list[Event] = timeline.events[kind].items if kind in timeline.events else []
    return list({int(_EVENTS_DRAWN * event.at / seconds): event.at for event in reversed(events)}.values())[::-1]


def ordinal(count: int) -> str:
    """Returns "1st", "2nd" and so on."""
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"
