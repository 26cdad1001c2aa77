"""A training as an HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tfopt.callbacks.report.learning_curves import Epoch, curves, in_pairs, lost_since
from tfopt.callbacks.report.timeline import BoundedList, Timeline
from tfopt.callbacks.report.training_charts import (
    chart,
    figures,
    known,
    number,
    ordinal,
    thinned,
    time_marks,
)
from tfopt.causes.between_gpus import Replicas, Straggler, names, straggler, unused_gpus
from tfopt.causes.readings import Readings
from tfopt.causes.training_verdict import verdict
from tfopt.hardware import GpuSample
from tfopt.page import Page, Section, Table, duration, entries, render

_EPOCHS_SHOWN = 20
_EVENTS_SHOWN = 40
# An interruption is noticed within a second or two, and steps are reported once a second.
_IDLE_SECONDS = 5.0
# As many columns fit beside the epoch's number and duration on a screen 1,280 pixels wide.
_COLUMNS = 8
_SPEED = ("step_time_ms", "examples_per_second")
# What the verdict takes of each GPU.
_JUDGED = (
    "gpu_utilization_percent",
    "sm_active_percent",
    "tensor_active_percent",
    "gpu_power_watts",
    "sm_clock_mhz",
    "gpu_memory_others_mib",
)
# In so much of the time, throttling explains why a GPU is slower than others. Which reason it was is not kept.
_SLOWED, _SLOWED_PERCENT = ("hw_slowdown",), 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One training, complete or so far."""

    name: str
    """The model's name."""
    seconds: float
    """How long it has taken."""
    ended: bool
    """Whether `fit` ran to its end."""
    written: str
    """The wall-clock time of this record."""
    first_step_end: float | None
    """Seconds since the training began; None if no step ended."""
    timeline: Timeline
    learning: Timeline
    """The logs within epochs, by key."""
    epochs: BoundedList[Epoch]
    environment: Mapping[str, Any]
    """As `tfopt.measure.environment` returns it."""
    setup: Sequence[str] = ()
    """How it was trained, in words."""
    idle_seconds: float = 0.0
    """How long no step had ended when the page of an interrupted training was written; within a second or two."""
    batch_size: float | None = None
    """Examples per step, None if unknown."""
    step_time_ms: float | None = None
    """The median of all steps but the first, None if unknown."""
    replicas: Replicas | None = None
    """How the model was spread over devices, None if unknown."""


def report(record: Record) -> str:
    """Returns the page as HTML.

    Raises:
        tfopt.errors.UnsupportedError: If jinja2 is not installed.
    """
    readings = readings_since(record.timeline, record.first_step_end or 0.0)
    found = verdict(readings, seconds=record.seconds, first_step_end=record.first_step_end, replicas=record.replicas)
    # Copied: callbacks may still add keys to the last epoch's logs.
    epochs = [
        replace(epoch, logs={str(key): value for key, value in dict(epoch.logs).items()})
        for epoch in record.epochs.items
    ]
    slow = straggler(readings.gpus, record.replicas)
    record, readings, without = _without_unused_gpus(record, readings)
    lost = lost_since("loss", epochs, record.learning)
    diverged = f"The loss has not been a number since {lost}. " if lost is not None else ""
    idle = f", {duration(record.idle_seconds)} after its last step" if record.idle_seconds >= _IDLE_SECONDS else ""
    unfinished = "" if record.ended else f" The training had not ended when this page was written{idle}."
    sections = [
        _learning(record, epochs),
        _timeline(record, without, slow),
        _epochs(epochs, record.epochs.count),
        _events(record.timeline),
        _environment(record.environment),
    ]
    return render(
        Page(
            title=f"Training of {record.name}",
            lead=f"{diverged}{found}\n\n{_summary(record)}{unfinished}\n\n{_environment_in_words(record)}",
            figures=_key_figures(record, readings),
            sections=[section for section in sections if section is not None],
            footer=f"Written by tfopt {record.environment.get('tfopt', '')}, {record.written}.",
        )
    )


def _without_unused_gpus(record: Record, readings: Readings) -> tuple[Record, Readings, str]:
    """Both without the GPUs that no replica uses, and a sentence that names these."""
    unused = unused_gpus(readings.gpus, record.replicas)
    if unused is None:
        return record, readings, ""
    idle = [gpu for gpu in readings.gpus if gpu.index in unused.idle]
    used = tuple(gpu for gpu in readings.gpus if gpu not in idle)
    record = replace(record, timeline=record.timeline.without(unused.idle))
    return record, replace(readings, gpus=used), f"Without {names(idle)}, which no replica uses."


def readings_since(timeline: Timeline, since: float) -> Readings:
    """Returns the means of a timeline from a time on, as `tfopt.causes` takes them."""

    def means(quantity: str) -> dict[int | None, Any]:
        found = {device: one.mean(since) for device, one in timeline.series.get(quantity, {}).items()}
        return {device: mean for device, mean in found.items() if mean is not None}

    readings = {name: means(name) for name in _JUDGED}
    throttled = means("throttled_percent")
    gpus = tuple(
        GpuSample(
            0.0,
            0.0,
            index=index,
            throttle_reasons=_SLOWED if throttled.get(index, 0.0) >= _SLOWED_PERCENT else None,
            **{name: found.get(index) for name, found in readings.items()},
        )
        for index in dict.fromkeys(index for found in readings.values() for index in found)
    )
    return Readings(
        gpus=gpus,
        input_wait_percent=means("input_wait_percent").get(None),
        host_cpu_percent=means("host_cpu_percent").get(None),
        throttled_percent=fmean(throttled.values()) if throttled else None,
    )


def _summary(record: Record) -> str:
    """How much was trained, and what happened."""
    events = [_counted(kept.count, kind) for kind, kept in sorted(record.timeline.events.items())]
    happened = f" {', '.join(events)}." if events else ""
    return f"{_counted(record.epochs.count, 'epoch')} in {duration(record.seconds)}.{happened}"


def _environment_in_words(record: Record) -> str:
    """What it was trained on, and how."""
    packages, driver = record.environment.get("packages", {}), record.environment.get("driver")
    gpus = [gpu["name"] for gpu in record.environment.get("gpus", ())]
    cpu = record.environment.get("host", {}).get("cpu_model") or "An unknown CPU"
    words = [f"{len(gpus)} × {gpus[0]}" if len(gpus) > 1 else gpus[0] if gpus else f"{cpu}, no GPU"]
    words += [f"driver {driver}"] if driver else []
    words += [f"TensorFlow {packages.get('tensorflow')}", f"Keras {packages.get('keras')}", *record.setup[:1]]
    words += [f"batch size {record.batch_size:,.0f}"] if record.batch_size else []
    return f"{', '.join([*words, *record.setup[1:]])}."


def _key_figures(record: Record, readings: Readings) -> list[tuple[str, str, str]]:
    """The means since the first step that say most; what is unknown is left out."""
    since = record.first_step_end or 0.0

    def mean(name: str) -> float | None:
        series = record.timeline.series.get(name, {}).get(None)
        return None if series is None else series.mean(since)

    flops = ("Model FLOPs utilisation", mean("mfu_percent"), "%")
    if flops[1] is None:
        flops = ("Model FLOPs, peak unknown", mean("model_tflops_per_second"), "TFLOP/s")
    busy = [gpu.gpu_utilization_percent for gpu in readings.gpus if gpu.gpu_utilization_percent is not None]
    values = [
        ("Throughput", mean("examples_per_second"), "examples/s"),
        ("Median step", record.step_time_ms, "ms"),
        ("Waited for input", readings.input_wait_percent, "%"),
        ("GPU busy" if len(busy) == 1 else "GPUs busy", fmean(busy) if busy else None, "%"),
        flops,
        _energy(record.timeline),
    ]
    return [(name, number(value), unit) for name, value, unit in values if value is not None]


def _energy(timeline: Timeline) -> tuple[str, float | None, str]:
    series = timeline.series.get("gpu_energy_kwh", {}).get(None)
    # Unknown at the end: a GPU was lost, or its counter went back.
    if series is None or series.points[-1].mean is None:
        return "Energy", None, ""
    return ("Energy", series.highest, "kWh") if series.highest >= 1 else ("Energy", 1000 * series.highest, "Wh")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _epoch_ends(record: Record) -> list[float]:
    return [epoch.end for epoch in record.epochs.items]


def _learning(record: Record, epochs: Sequence[Epoch]) -> Section | None:
    seconds = max(record.seconds, 1e-9)
    marks = time_marks(record.timeline, seconds=seconds, epoch_ends=_epoch_ends(record))
    found = curves(epochs, record.learning, seconds=seconds, marks=marks)
    if found is None:
        return None
    drawn, left_out = found
    text = f"{_counted(left_out, 'more metric')}: see the table of all logged keys below." if left_out else ""
    return Section("Learning", text, charts=[drawn])


def _timeline(record: Record, text: str, slow: Straggler | None) -> Section:
    since = record.first_step_end or 0.0
    drawn = chart(
        record.timeline,
        seconds=max(record.seconds, 1e-9),
        epoch_ends=_epoch_ends(record),
        since=since,
        apart=None if slow is None else slow.index,
        step_time_ms=record.step_time_ms,
    )
    if drawn is None:
        return Section("Hardware and speed", "Nothing was read: the training ended before the first sample.")
    details = [("In figures", _figures(record.timeline, since))]
    if len(record.timeline.series.get("gpu_utilization_percent", ())) > 1:
        details.append(("Mean of each GPU", _each_gpu(record)))
    return Section("Hardware and speed", text, charts=[drawn], details=details)


def _figures(timeline: Timeline, since: float) -> Table:
    rows = []
    for quantity, devices in (pair for pairs in known(timeline).values() for pair in pairs):
        mean, low, high = figures(quantity, devices, since)
        text = "–" if quantity.total or mean is None else number(mean)
        rows.append((quantity.title, quantity.unit, text, number(low), number(high)))
    return Table(("Quantity", "Unit", "Mean", "Lowest", "Highest"), rows, align="llrrr")


def _each_gpu(record: Record) -> Table:
    """The means since the first step, so that a GPU that differs from the others stands out."""
    since = record.first_step_end or 0.0
    pairs = [(quantity, devices) for quantity, devices in known(record.timeline)["GPUs"] if not quantity.total]
    gpus = sorted({index for _, devices in pairs for index in devices if index is not None})
    rows = []
    for quantity, devices in pairs:
        means = [devices[index].mean(since) if index in devices else None for index in gpus]
        texts = ["–" if mean is None else number(mean / quantity.part) for mean in means]
        rows.append((quantity.title, quantity.unit, *texts))
    return Table(("Quantity", "Unit", *(f"GPU {index}" for index in gpus)), rows, align="ll" + "r" * len(gpus))


def _epochs(kept: Sequence[Epoch], count: int) -> Section:
    if not kept:
        return Section("Epochs", "No epoch has ended.")
    keys = list(dict.fromkeys(key for epoch in kept for key in epoch.logs))
    speed = [key for key in _SPEED if key in keys]
    main = [*in_pairs(keys)[: _COLUMNS - len(speed)], *speed]
    shown = [*thinned(kept[:-1], _EPOCHS_SHOWN - 1), kept[-1]]
    text = f"{len(shown)} of {count}, evenly over the training." if len(shown) < count else ""
    details = []
    if len(shown) < len(kept) or len(main) < len(keys):
        title = f"All logged keys of {len(kept)} epochs" if len(kept) > 1 else "All logged keys"
        details = [(title, _table(kept, keys))]
    return Section("Epochs", text, tables=[_table(shown, main)], details=details)


def _table(epochs: Sequence[Epoch], keys: Sequence[str]) -> Table:
    rows = [
        (str(epoch.number), duration(epoch.end - epoch.begin), *(_value(epoch.logs.get(key)) for key in keys))
        for epoch in epochs
    ]
    return Table(("Epoch", "Took", *keys), rows, align="r" * (len(keys) + 2))


def _value(value: Any) -> str:
    """A logged value; a dash if an epoch has none."""
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def _events(timeline: Timeline) -> Section | None:
    rows = sorted((event.at, kind, event.text) for kind, kept in timeline.events.items() for event in kept.items)
    if not rows:
        return None
    dropped = [
        f"every {ordinal(kept.every)} {kind} of {kept.count}"
        for kind, kept in timeline.events.items()
        if kept.every > 1
    ]
    table = Table(("At", "Event", "What"), [(duration(at), kind, text) for at, kind, text in rows], align="lll")
    text = f"Shown: {', '.join(dropped)}." if dropped else ""
    if len(rows) > _EVENTS_SHOWN:
        return Section("Events", text, details=[(f"{len(rows)} events", table)])
    return Section("Events", text, tables=[table])


def _environment(environment: Mapping[str, Any]) -> Section:
    return Section("Environment", details=[("Everything recorded", Table(("What", "Value"), entries(environment)))])
