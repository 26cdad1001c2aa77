"""What other frameworks' scripts measured on the same machine, beside a run."""

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfopt.bench import words
from tfopt.errors import ResultsError
from tfopt.page import Bar, Table

SCHEMA = "tfopt-peers"
SCHEMA_VERSION = 1

_TEXTS = ("workload", "variant", "device", "torch")


def document(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Makes a document of the lines of JSON that the scripts in `benchmarks/peers` printed."""
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "lines": list(lines)}


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the lines of such a document.

    Raises:
        tfopt.errors.ResultsError: It is none, or not whole.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if (found["schema"], found["schema_version"]) != (SCHEMA, SCHEMA_VERSION):
            raise ValueError(f"the schema {found['schema']!r}, {found['schema_version']!r}")
        for line in found["lines"]:
            if not all(isinstance(line[name], str) for name in _TEXTS) or not min(line["samples_ms"]) > 0:
                raise ValueError(f"a line {line!r}")
            _ = line["batch_size"], line["peak_memory_mib"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"Expected a document of peers, schema version {SCHEMA_VERSION}. Found in {path}: {error!r}. Run the "
            "scripts again."
        ) from error
    lines: list[dict[str, Any]] = found["lines"]
    return lines


def on(device_names: Sequence[str], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of these devices."""
    return [line for line in lines if line["device"] in device_names]


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """A row for each variant; blocks before and after a run are taken together."""
    rows = [
        (
            f"{workload}, {variant}",
            words.number(ms),
            words.number(1000 * line["batch_size"] / ms),
            "" if line["peak_memory_mib"] is None else f"{line['peak_memory_mib']:,.0f}",
            f"torch {line['torch']}",
        )
        for workload, variant, ms, line in _medians(lines)
    ]
    headers = ("PyTorch", "ms a step", "Examples a second", "Peak MiB", "Version")
    return Table(headers, rows, align="lrrrl")


def bars(case: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[Bar]:
    """Bars for the peers of a case, with the same batch size: as long as they are fast against its baseline."""
    baseline = next(v["step_time"] for v in case["variants"] if v["name"] == case["baseline"])
    same = [
        line
        for line in lines
        if (line["workload"], line["batch_size"]) == (case["workload"], baseline["examples_per_step"])
    ]
    speeds = [(variant, baseline["median_ms"] / ms) for _, variant, ms, _ in _medians(same)]
    return [Bar(f"PyTorch, {variant}", ratio, f"{words.number(ratio)}×") for variant, ratio in speeds]


def _medians(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    for workload, variant in dict.fromkeys((line["workload"], line["variant"]) for line in lines):
        same = [line for line in lines if (line["workload"], line["variant"]) == (workload, variant)]
        yield workload, variant, statistics.median(ms for line in same for ms in line["samples_ms"]), same[0]
