"""Where a training step's time goes, and into which operations, from a profiler's trace."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfopt.callbacks.profiler.waiting import input_wait
from tfopt.errors import UnsupportedError, summarize_error
from tfopt.text import Shown, aligned

_OPERATIONS = 10
# XProf's columns of a step, in milliseconds.
_SHARES = {
    "input_percent": "infeedTimeMs",
    "output_percent": "outfeedTimeMs",
    "host_compute_percent": "hostComputeTimeMs",
    "kernel_launch_percent": "kernelLaunchTimeMs",
    "device_compute_percent": "deviceComputeTimeMs",
    "device_to_device_percent": "deviceToDeviceTimeMs",
    "device_collectives_percent": "deviceCollectivesTimeMs",
    "compilation_percent": "compileTimeMs",
    "other_percent": "otherTimeMs",
}
# XProf writes 0 for these if there is no device.
_DEVICE_SHARES = {
    "kernel_launch_percent",
    "device_compute_percent",
    "device_to_device_percent",
    "device_collectives_percent",
}
_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a trace, with its own time: without that of operations it calls."""

    name: str
    """Its name in the graph."""
    kind: str
    """Its type: "MatMul"."""
    place: str
    """Where it ran: "Host" or "Device"."""
    calls: int
    time_ms: float
    """The time of all calls together."""
    percent: float
    """Its share of the time of all operations in that place."""


@dataclass(frozen=True, slots=True, repr=False)
class TraceSummary(Shown):
    """A trace's steps: their mean time, the shares of that time, and its costliest operations. None: unknown."""

    folder: str
    hardware: str | None
    """As XProf names it: "GPU", "CPU_ONLY"."""
    steps: int
    """Each step of an execution (`steps_per_execution`) counts."""
    step_time_ms: float | None
    """The mean, of the marked steps if those that XProf reads from the device are shorter."""
    input_percent: float | None
    """Waiting for a batch while the device idles, or copying it there. None if the trace does not show the waiting."""
    output_percent: float | None
    """Copying results from the device."""
    host_compute_percent: float | None
    """Other computation on the host."""
    kernel_launch_percent: float | None
    """Launching kernels while the device waits."""
    device_compute_percent: float | None
    device_to_device_percent: float | None
    """Copies between devices."""
    device_collectives_percent: float | None
    """All-reduce and the like."""
    compilation_percent: float | None
    other_percent: float | None
    """The rest, such as Python."""
    operations: tuple[Operation, ...]
    """The ten with the most time, of the device if there is one, else of the host."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self) | {"operations": [asdict(operation) for operation in self.operations]}

    def __str__(self) -> str:
        """Formats the shares of a step and the operations as tables."""
        mean = f"of {self.step_time_ms:.3g} ms on average" if self.step_time_ms else "that XProf can read"
        cells = [
            (name.removesuffix("_percent").replace("_", " "), f"{percent:.1f} %")
            for name in _SHARES
            if (percent := getattr(self, name)) is not None
        ]
        lines = [f"{self.steps} steps {mean} ({self.hardware or 'unknown hardware'}), in {self.folder}"]
        lines += aligned(cells, texts=1) if cells else []
        if self.operations:
            head = ("operation", "type", "calls", "ms", "share")
            lines += ["", f"Operations of the {self.operations[0].place.lower()} that take the most time:"]
            rows = [
                (one.name, one.kind, str(one.calls), f"{one.time_ms:.3f}", f"{one.percent:.1f} %")
                for one in self.operations
            ]
            lines += aligned([head, *rows], texts=2)
        return "\n".join(lines)


def summarize_trace(folder: str | os.PathLike[str], *, steps_per_execution: int = 1) -> TraceSummary:
    """Summarizes the traces of all hosts in `LOG_DIR/plugins/profile/TIME`, with `steps_per_execution` under each mark.

    XProf takes a second for it, or a few per 10 MB of a large trace.

    Raises:
        ValueError: If there is no trace in the folder.
        tfopt.errors.UnsupportedError: If xprof is not installed, or cannot read the trace.
    """
    files = sorted(map(str, Path(folder).glob("*.xplane.pb")))
    if not files:
        raise ValueError(
            f"Expected a folder with a trace (*.xplane.pb). Received: {os.fspath(folder)!r}. "
            "Name the folder of one trace, LOG_DIR/plugins/profile/TIME."
        )
    for path in files:
        if not os.path.getsize(path):  # which XProf would take for a trace without steps
            raise _unreadable([path], "an empty file")
    # XProf caches its results beside the trace, and does not notice when the trace was replaced.
    steps = _table(files, "input_pipeline_analyzer", "stepTimeMs", use_saved_result=False)
    operations = _table(files, "framework_op_stats", "operation", use_saved_result=True)
    executions, hardware = _rows(steps), steps.get("p", {}).get("hardware_type")
    count = len(executions) * steps_per_execution
    total, shares = _shares(executions, hardware, files)
    return TraceSummary(
        folder=os.fspath(folder),
        hardware=hardware,
        steps=count,
        step_time_ms=total / count if count else None,
        **{name: None if ms is None else 100 * ms / total for name, ms in shares.items()},
        operations=_most_expensive(_rows(operations)),
    )


def _table(files: Sequence[str], tool: str, column: str, **options: bool) -> dict[str, Any]:
    """The table with a given column among those that one of XProf's tools makes of a trace."""
    try:
        xprof = importlib.import_module("xprof.convert.raw_to_tool_data")
    except ImportError as cause:
        raise UnsupportedError(
            "Expected the package xprof, which reads traces. Found that it is not installed. "
            "Run pip install 'tfopt[profile]', or open the trace on a machine that has it."
        ) from cause
    try:
        text, _ = xprof.xspace_to_tool_data(files, tool, options)
        tables = json.loads(text) if text else None
    except Exception as cause:  # whatever its parsers raise
        message = f"{type(cause).__name__}: {summarize_error(cause)}"
        raise _unreadable(files, f"that its tool {tool} fails with {message}") from cause
    if tables is None:
        raise _unreadable(files, f"that its tool {tool} returns nothing")
    return next((table for table in tables if column in _ids(table)), {})


def _unreadable(files: Sequence[str], found: str) -> UnsupportedError:
    return UnsupportedError(
        f"Expected a trace that XProf can read in {', '.join(files)}. Found {found}. "
        "Record it again: it is incomplete, as after a full disk, or from another version of TensorFlow."
    )


def _ids(table: Mapping[str, Any]) -> list[str]:
    return [column["id"] for column in table.get("cols", [])]


def _rows(table: Mapping[str, Any]) -> list[_Row]:
    """A table's rows, as dicts by column."""
    return [dict(zip(_ids(table), [cell["v"] for cell in row["c"]], strict=True)) for row in table.get("rows", [])]


def _shares(
    executions: Sequence[_Row], hardware: str | None, files: Sequence[str]
) -> tuple[float, dict[str, float | None]]:
    """The milliseconds of all steps, and of what they consist of, where known."""
    total = sum(execution["stepTimeMs"] for execution in executions)
    shares = {name: _sum(executions, name, hardware) for name in _SHARES}
    copied, computed = shares["input_percent"], shares["host_compute_percent"]
    found = input_wait(files, {execution.get("stepnum", "") for execution in executions}) if executions else None
    if found is None or copied is None or computed is None:
        return total, shares | {"input_percent": None}
    # XProf takes waiting in a thread of tf.data for computation by the host. Or it takes the steps from the device, and
    # they lack the time before the first kernel.
    marked, waited = found
    missing, unseen = max(0.0, marked - total), max(0.0, waited - copied)
    total += missing
    shares["input_percent"] = copied + unseen
    shares["host_compute_percent"] = computed - min(computed, max(0.0, unseen - missing))
    rest = total - sum(share or 0.0 for name, share in shares.items() if name != "other_percent")
    return total, shares | {"other_percent": max(0.0, rest)}


def _sum(executions: Sequence[_Row], share: str, hardware: str | None) -> float | None:
    """A share of the steps' time in milliseconds, None if unknown."""
    column = _SHARES[share]
    if not executions or (share in _DEVICE_SHARES and hardware == "CPU_ONLY"):
        return None
    if any(column not in execution for execution in executions):
        return None
    return float(sum(execution[column] for execution in executions))


def _most_expensive(rows: Sequence[_Row]) -> tuple[Operation, ...]:
    busy = [row for row in rows if row["type"] != "IDLE"]
    place = "Device" if any(row["host_or_device"] == "Device" for row in busy) else "Host"
    there = [row for row in busy if row["host_or_device"] == place]
    total = sum(row["total_self_time"] for row in there)
    first = sorted(there, key=lambda row: -row["total_self_time"])[:_OPERATIONS]
    return tuple(
        Operation(
            name=row["operation"],
            kind=row["type"],
            place=place,
            calls=int(row["occurrences"]),
            time_ms=row["total_self_time"] / 1000,
            percent=100 * row["total_self_time"] / total if total else 0.0,
        )
        for row in first
    )
