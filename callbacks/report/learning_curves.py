"""A training's loss and metrics: which keys of the logs they are, and their curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tfopt.callbacks.report.timeline import Timeline
from tfopt.callbacks.report.training_charts import number, or_none
from tfopt.page import Line, Marks, Panel, duration, line_chart

# Keys with these endings describe speed, not quality; tfopt's callbacks log dozens of them.
_UNITS = ("_percent", "_mib", "_watts", "_joules", "_celsius", "_mhz", "_ms", "_second", "_seconds", "_examples")
_COUNTS = ("loss_scale", "skipped_steps", "loss_scale_growths", "xla_compilations")
# With fewer epochs, the values inside them say more than those at their ends.
_FEWEST_EPOCHS = 5
_PANELS = 9
# A loss that falls by more than this is drawn on a logarithmic axis.
_WIDE = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch."""

    number: int
    """From 1, as Keras prints it."""
    begin: float
    """Seconds since the training began."""
    end: float
    logs: Mapping[str, Any]


def is_quality(key: str) -> bool:
    """Whether a key of the logs says how good the model is, not how fast it trains."""
    return not key.endswith(_UNITS) and key not in _COUNTS


def in_pairs(keys: Iterable[str]) -> list[str]:
    """Returns the keys of loss and metrics, each followed by its validation; the loss first, the learning rate last.

    Example:
        >>> in_pairs(["accuracy", "learning_rate", "loss", "val_accuracy", "val_loss", "step_time_ms"])
        ['loss', 'val_loss', 'accuracy', 'val_accuracy', 'learning_rate']
    """
    quality = [key for key in keys if is_quality(key)]
    place = {key: number for number, key in enumerate(quality)}

    def order(key: str) -> tuple[int, int, bool]:
        name = key.removeprefix("val_")
        rank = {"loss": 0, "learning_rate": 2}.get(name, 1)
        return rank, min(place[key], place.get(name, place[key])), name != key

    return sorted(quality, key=order)


def curves(
    epochs: Sequence[Epoch], steps: Timeline, *, seconds: float, marks: Sequence[Marks] = ()
) -> tuple[str, int] | None:
    """Returns the curves as a figure, and how many are left out; None if there is nothing to draw.

    They run over epochs; over time where there are only a few.

    Args:
        epochs: Those that have ended, or some of them.
        steps: Logs within epochs, by key.
        seconds: End of the axis of time.
        marks: Moments on it.
    """
    over_time = len(epochs) < _FEWEST_EPOCHS
    keys = dict.fromkeys([*(steps.series if over_time else ()), *(key for epoch in epochs for key in epoch.logs)])
    names = dict.fromkeys(key.removeprefix("val_") for key in in_pairs(keys))
    panels = []
    for name in names:
        lines = [_over_time(name, epochs, steps), _over_epochs(f"val_{name}", epochs, time=True)]
        if not over_time:
            lines = [_over_epochs(name, epochs), _over_epochs(f"val_{name}", epochs)]
        counts = [sum(value is not None for value in line.values) for line in lines]
        known = [line for line, count in zip(lines, counts, strict=True) if count]
        if max(counts) > 1:
            panels.append(_panel(name, known, lost_since(name, epochs, steps)))
    if not panels:
        return None
    if over_time:
        axis: dict[str, Any] = {"seconds": seconds, "marks": marks}
        how = "Training: the mean since the epoch began, as Keras logs it."
        if any(key.startswith("val_") for key in keys):
            how += " Validation: one value per epoch."
    else:
        axis = {"epochs": (epochs[0].number, epochs[-1].number)}
        how = "At the end of each epoch, as Keras logs it."
    columns = min(3, 1 + len(panels))
    drawn = line_chart(panels[:_PANELS], title="Loss and metrics", description=how, columns=columns, **axis)
    return drawn, len(panels) - len(panels[:_PANELS])


def lost_since(key: str, epochs: Sequence[Epoch], steps: Timeline) -> str | None:
    """Says since when a logged value is not finite; None if the last one is finite, or not a number at all."""
    since = None
    for epoch in reversed(epochs):
        value = epoch.logs.get(key)
        if not isinstance(value, float | int) or math.isfinite(value):
            break
        since = f"epoch {epoch.number}"
    series = steps.series.get(key, {}).get(None)
    unknown = list(takewhile(lambda point: point.mean is None, reversed(series.points))) if series else []
    return since or (f"{duration(unknown[-1].begin)} after the start" if unknown else None)


def _panel(name: str, lines: Sequence[Line], lost: str | None) -> Panel:
    last = [next(value for value in reversed(line.values) if value is not None) for line in lines]
    texts = [f"{value:.3g}" if abs(value) < 1000 else number(value) for value in last]
    if len(lines) > 1:
        texts = [f"{line.label} {text}" for line, text in zip(lines, texts, strict=True)]
    text = f"not a number since {lost}" if lost is not None else ", ".join(texts)
    values = [value for line in lines for value in line.values if value is not None]
    wide = name == "loss" or name.endswith("_loss")
    wide = wide and min(values) > 0 and max(values) > _WIDE * min(values)
    return Panel(name, "", lines, text=text, from_zero=False, logarithmic=wide)


def _over_epochs(key: str, epochs: Sequence[Epoch], *, time: bool = False) -> Line:
    label = "validation" if key.startswith("val_") else "training"
    places = [epoch.end if time else epoch.number for epoch in epochs]
    return Line(label, places, [_finite(epoch.logs.get(key)) for epoch in epochs])


def _over_time(key: str, epochs: Sequence[Epoch], steps: Timeline) -> Line:
    series = steps.series.get(key, {}).get(None)
    if series is None:
        return _over_epochs(key, epochs, time=True)
    at, _, mean, _ = series.curve()
    return Line("training", at.tolist(), or_none(mean))


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, float | int) and math.isfinite(value) else None
