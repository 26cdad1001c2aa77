"""A training as an HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tfopt.callbacks.report.timeline import BoundedList, Timeline
from tfopt.callbacks.report.training_charts import chart, figures, known, number, ordinal, thinned
from tfopt.causes.known_causes import verdict
from tfopt.causes.readings import Readings
from tfopt.hardware import GpuSample
from tfopt.page import Page, Section, Table, duration, entries, render

_EPOCHS_SHOWN = 20
_EVENTS_SHOWN = 40
# Keys with these endings describe speed, not quality; tfopt's callbacks log dozens of them.
_UNITS = ("_percent", "_mib", "_watts", "_joules", "_celsius", "_mhz", "_ms", "_second", "_seconds", "_examples")
_SPEED = ("step_time_ms", "examples_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch."""

    number: int
    """From 1, as Keras prints it."""
    begin: float
    """Seconds since the training began."""
    end: float
    logs: Mapping[str, Any]


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
    epochs: BoundedList[Epoch]
    environment: Mapping[str, Any]
    """As `tfopt.measure.environment` returns it."""
    optimizer: str | None = None
    """The name of its class, None if unknown."""
    batch_size: float | None = None
    """Examples per step, None if unknown."""


def report(record: Record) -> str:
    """Returns the page as HTML.

    Raises:
        tfopt.errors.UnsupportedError: If jinja2 is not installed.
    """
    readings = readings_since(record.timeline, record.first_step_end or 0.0)
    found = verdict(readings, seconds=record.seconds, first_step_end=record.first_step_end)
    unfinished = "" if record.ended else " The training had not ended when this page was written."
    sections = [_timeline(record), _epochs(record.epochs), _events(record.timeline), _environment(record.environment)]
    return render(
        Page(
            title=f"Training of {record.name}",
            lead=f"{found}\n\n{_summary(record)}{unfinished}",
            sections=[section for section in sections if section is not None],
            footer=f"Written by tfopt {record.environment.get('tfopt', '')}, {record.written}.",
        )
    )


def readings_since(timeline: Timeline, since: float) -> Readings:
    """Returns the means of a timeline from a time on, as `tfopt.causes` takes them."""

    def means(quantity: str) -> dict[int | None, Any]:
        found = {device: one.mean(since) for device, one in timeline.series.get(quantity, {}).items()}
        return {device: mean for device, mean in found.items() if mean is not None}

    names = ("gpu_utilization_percent", "sm_active_percent", "tensor_active_percent")
    activity = {name: means(name) for name in names}
    gpus = tuple(
        GpuSample(0.0, 0.0, index=index, **{name: found.get(index) for name, found in activity.items()})
        for index in dict.fromkeys(index for found in activity.values() for index in found)
    )
    throttled = means("throttled_percent").values()
    return Readings(
        gpus=gpus,
        input_wait_percent=means("input_wait_percent").get(None),
        host_cpu_percent=means("host_cpu_percent").get(None),
        throttled_percent=fmean(throttled) if throttled else None,
    )


def _summary(record: Record) -> str:
    """How much was trained, and on what."""
    environment = record.environment
    count = record.epochs.count
    trained = f"{_counted(count, 'epoch')} in {duration(record.seconds)}"
    names = [gpu["name"] for gpu in environment.get("gpus", ())]
    host, packages = environment.get("host", {}), environment.get("packages", {})
    device = f"{len(names)} × {names[0]}" if names else f"{host.get('cpu_model') or 'an unknown CPU'}, without a GPU"
    events = [_counted(kept.count, kind) for kind, kept in sorted(record.timeline.events.items())]
    happened = f" {' and '.join(events)}." if events else ""
    versions = f"TensorFlow {packages.get('tensorflow')}, Keras {packages.get('keras')}"
    return f"{'; '.join([f'{trained} on {device}', *_setup(record), versions])}.{happened}"


def _setup(record: Record) -> list[str]:
    """How it was trained, as far as known."""
    series = record.timeline.series.get("mfu_percent", {}).get(None)
    mfu = None if series is None else series.mean(record.first_step_end or 0.0)
    known = [record.optimizer] if record.optimizer else []
    known += [f"batch size {record.batch_size:,.0f}"] if record.batch_size else []
    known += [f"model FLOPs utilisation {mfu:.3g}\u00a0%"] if mfu is not None else []
    return [", ".join(known)] if known else []


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _timeline(record: Record) -> Section:
    drawn = chart(
        record.timeline,
        seconds=max(record.seconds, 1e-9),
        epoch_ends=[epoch.end for epoch in record.epochs.items],
    )
    if drawn is None:
        return Section("Timeline", "Nothing was read: the training ended before the first sample.")
    return Section("Timeline", charts=[drawn], details=[("In figures", _figures(record.timeline))])


def _figures(timeline: Timeline) -> Table:
    rows = []
    for quantity, devices in known(timeline):
        mean, low, high = (number(value) for value in figures(quantity, devices))
        rows.append((quantity.title, quantity.unit, mean, low, high))
    return Table(("Quantity", "Unit", "Mean", "Lowest", "Highest"), rows, align="llrrr")


def _epochs(epochs: BoundedList[Epoch]) -> Section:
    if not epochs.count:
        return Section("Epochs", "No epoch has ended.")
    # Copied: callbacks may still add keys to the last epoch's logs.
    kept = [replace(epoch, logs={str(key): value for key, value in dict(epoch.logs).items()}) for epoch in epochs.items]
    keys = list(dict.fromkeys(key for epoch in kept for key in epoch.logs))
    main = [key for key in keys if not key.endswith(_UNITS) or key in _SPEED]
    shown = [*thinned(kept[:-1], _EPOCHS_SHOWN - 1), kept[-1]]
    text = f"{len(shown)} of {epochs.count}, evenly over the training." if len(shown) < epochs.count else ""
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
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _events(timeline: Timeline) -> Section | None:
    rows = sorted((event.at, kind, event.text) for kind, kept in timeline.events.items() for event in kept.items)
    if not rows:
        return None
    dropped = [
        f"every {ordinal(kept.every)} {kind} of {kept.count}"
        for kind, kept in timeline.events.items()
        if kept.every > 1
    ]
    table = Table(("At", "Event", "What"), [(duration(at), kind, text) for at, kind, text in rows], align="rll")
    text = f"Shown: {', '.join(dropped)}." if dropped else ""
    if len(rows) > _EVENTS_SHOWN:
        return Section("Events", text, details=[(f"{len(rows)} events", table)])
    return Section("Events", text, tables=[table])


def _environment(environment: Mapping[str, Any]) -> Section:
    return Section("Environment", tables=[Table(("What", "Value"), entries(environment))])
