"""The chart of a precision report, also of a recorded one: drawing it loads no TensorFlow."""

from collections.abc import Mapping
from typing import Any

from tfopt.page import Bar, bar_chart
from tfopt.text import percent

_BARS = 16


def chart_of(report: Mapping[str, Any]) -> str:
    """Returns the chart of a report stored as `PrecisionReport.to_dict` values."""
    layers = [layer for layer in report["layers"] if layer["output"]]
    ranked = sorted(layers, key=lambda layer: (layer["blamed"], _length(layer)), reverse=True)[:_BARS]
    bars = [
        Bar(
            layer["path"],
            _length(layer),
            _text(layer),
            tone="worse" if layer["blamed"] else "plain",
            meaning="blamed" if layer["blamed"] else "within the limits",
        )
        for layer in ranked
    ]
    left_out = f" The {len(ranked)} furthest of {len(layers)} layers." if len(ranked) < len(layers) else ""
    return bar_chart(
        bars,
        title=f"Distance of each layer's output from float32 under {report['policy']}",
        description=f"Norm of the difference over the norm, or the share that overflows. {report['verdict']}{left_out}",
    )


def _length(layer: Mapping[str, Any]) -> float:
    error = layer["output"]["error"]
    return float(max(1.0 if error is None else error, layer["output"]["overflow"]))


def _text(layer: Mapping[str, Any]) -> str:
    overflow = layer["output"]["overflow"]
    return f"{percent(overflow)} overflow" if overflow else percent(_length(layer))
