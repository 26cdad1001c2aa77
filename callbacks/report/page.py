"""A training as an HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfopt.callbacks.report.charts import chart, figures, known, number, thinned
from tfopt.callbacks.report.timeline import Kept, Timeline
from tfopt.callbacks.report.verdict import verdict
from tfopt.page import Page, Section, Table, duration, entries, render

_EPOCHS_SHOWN = 20
_EVENTS_SHOWN = 40
# Keys that end so say how fast the training ran, not how well: with tfopt's callbacks there are dozens of them.
_UNITS = ("_percent", "_mib", "_watts", "_joules", "_celsius", "_mhz", "_ms", "_second", "_seconds", "_examples")
_SPEED = ("step_time_ms", "examples_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch.

    Attributes:
        number: From 1, as Keras prints it.
        begin: When it began, in seconds.
        end: When it ended.
        logs: Its logs.
    """

    number: int
    begin: float
    end: float
    logs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One training, to its end or so far.

    Attributes:
        name: The model's.
        seconds: How long it has taken.
        ended: Whether `fit` came to its end.
        written: The time of day at which this was written.
        first_step_end: When the first step had ended, in seconds; None where none did.
        timeline: What was read.
        epochs: Those that ended.
        optimizer: The name of its class; None where it is unknown.
        batch_size: Examples of a step; None where it is unknown.
        environment: `tfopt.measure.environment()`.
    """

    name: str
    seconds: float
    ended: bool
    written: str
    first_step_end: float | None
    timeline: Timeline
    epochs: Kept[Epoch]
    environment: Mapping[str, Any]
    optimizer: str | None = None
    batch_size: float | None = None


def report(record: Record) -> str:
    """Returns the page as HTML.

    Raises:
        tfopt.errors.UnsupportedError: jinja2 is not installed.
    """
    found = verdict(record.timeline, seconds=record.seconds, first_step_end=record.first_step_end)
    unfinished = "" if record.ended else " The training had not come to its end when this page was written."
    sections = [_timeline(record), _epochs(record.epochs), _events(record.timeline), _environment(record.environment)]
    return render(
        Page(
            title=f"Training of {record.name}",
            lead=f"{found}\n\n{_what(record)}{unfinished}",
            sections=[section for section in sections if section is not None],
            footer=f"Written by tfopt {record.environment.get('tfopt', '')}, {record.written}.",
        )
    )


def _what(record: Record) -> str:
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
    return f"{'; '.join([f'{trained} on {device}', *_how(record), versions])}.{happened}"


def _how(record: Record) -> list[str]:
    """How it was trained, as far as that is known."""
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
        return Section("Timeline", "Nothing was read: the training ended before the first reading.")
    return Section("Timeline", charts=[drawn], details=[("In figures", _figures(record.timeline))])


def _figures(timeline: Timeline) -> Table:
    rows = []
    for quantity, devices in known(timeline):
        mean, low, high = (number(value) for value in figures(quantity, devices))
        rows.append((quantity.title, quantity.unit, mean, low, high))
    return Table(("Quantity", "Unit", "Mean", "Lowest", "Highest"), rows, align="llrrr")


def _epochs(epochs: Kept[Epoch]) -> Section:
    if not epochs.count:
        return Section("Epochs", "None has ended.")
    # Copied, since callbacks of the epoch that has just ended may still add keys.
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
    """A logged value; a dash where an epoch has none."""
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _events(timeline: Timeline) -> Section | None:
    rows = sorted((event.at, kind, event.text) for kind, kept in timeline.events.items() for event in kept.items)
    if not rows:
        return None
    dropped = [
        f"every {kept.every}th {kind} of {kept.count}" for kind, kept in timeline.events.items() if kept.every > 1
    ]
    table = Table(("At", "Event", "What"), [(duration(at), kind, text) for at, kind, text in rows], align="rll")
    text = f"Of many, some are left out: {', '.join(dropped)}." if dropped else ""
    if len(rows) > _EVENTS_SHOWN:
        return Section("Events", text, details=[(f"{len(rows)} events", table)])
    return Section("Events", text, tables=[table])


def _environment(environment: Mapping[str, Any]) -> Section:
    return Section("Environment", tables=[Table(("What", "Value"), entries(environment))])
