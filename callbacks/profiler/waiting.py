"""How long the marked steps of a trace waited for a batch, which XProf sees only in the thread that marks them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorflow.tsl.profiler.protobuf import xplane_pb2

_Span = tuple[int, int]  # begin and end, picoseconds
_WAIT = "IteratorGetNextOp::DoCompute"  # with steps_per_execution above one, IteratorGetNextAsOptionalOp


def input_wait(files: Iterable[str], steps: set[str]) -> tuple[float, float] | None:
    """Returns the milliseconds of marked steps, and those in which they waited for a batch while no device worked.

    None if the trace lacks one of the steps, or shows no waiting in them: a loop may take its batches between steps,
    and with `steps_per_execution` above one a step takes its batch while the one before it computes.

    Args:
        files: The traces of all hosts (`*.xplane.pb`).
        steps: As XProf names them: "train 12".
    """
    marks: dict[str, list[_Span]] = {}
    waits: list[_Span] = []
    busy: list[_Span] = []
    for path in files:
        for plane in xplane_pb2.XSpace.FromString(Path(path).read_bytes()).planes:
            if plane.name.startswith("/device:"):
                busy += [_span(line, event) for line in plane.lines for event in line.events]
            else:
                _read_host(plane, marks, waits)
    if not steps <= marks.keys():
        return None
    marked = _merged(span for step in steps for span in marks[step])
    waited = _common(marked, _merged(waits))
    if not waited:
        return None
    return _ms(marked), _ms(waited) - _ms(_common(waited, _merged(busy)))


def _read_host(plane: Any, marks: dict[str, list[_Span]], waits: list[_Span]) -> None:
    """Adds a host's marked steps, and when they waited for a batch.

    A thread that prefetches to a device waits for batches too. TensorFlow numbers the runs of functions; a step's run
    is started by the thread that marks the step.
    """
    events = {key: metadata.name for key, metadata in plane.event_metadata.items()}
    stats = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
    runs, elsewhere = set(), []
    for line in plane.lines:
        found: dict[str, list[tuple[dict[str, int], _Span]]] = {"train": [], "FunctionRun": [], _WAIT: []}
        for event in line.events:
            name = events[event.metadata_id]
            if name in found:
                numbers = {stats[stat.metadata_id]: stat.int64_value or stat.uint64_value for stat in event.stats}
                found[name].append((numbers, _span(line, event)))
        steps = [(f"train {numbers['step_num']}", span) for numbers, span in found["train"] if "step_num" in numbers]
        for step, span in steps:
            marks.setdefault(step, []).append(span)
        if steps:
            runs |= {numbers.get("id") for numbers, _ in found["FunctionRun"]}
            waits += [span for _, span in found[_WAIT]]
        else:
            elsewhere += found[_WAIT]
    waits += [span for numbers, span in elsewhere if numbers.get("id") in runs]


def _span(line: Any, event: Any) -> _Span:
    begin = 1000 * line.timestamp_ns + event.offset_ps
    return begin, begin + event.duration_ps


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """The same time in spans that do not overlap, in their order."""
    merged: list[_Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _common(some: list[_Span], others: list[_Span]) -> list[_Span]:
    """The time that two lists of merged spans share."""
    common = []
    first = 0
    for begin, end in some:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            common.append((max(begin, others[at][0]), min(end, others[at][1])))
            at += 1
    return common


def _ms(spans: list[_Span]) -> float:
    return sum(end - begin for begin, end in spans) / 1e9
