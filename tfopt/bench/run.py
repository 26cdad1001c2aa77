"""Runs suites and records what they find: each case in a process of its own."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.bench import isolated, suites
from tfopt.bench.cases import CPU, GPU, Case, Scale
from tfopt.bench.isolated import ProcessError
from tfopt.bench.progress import Progress
from tfopt.bench.results import Results, dumps
from tfopt.measure import environment

_LISTING_SECONDS = 300.0
_Make = Callable[[Sequence[str], Scale | None], list[Case]]


def default_scale() -> Scale:
    """The size for this machine: larger where there is a GPU."""
    return GPU if tf.config.list_physical_devices("GPU") else CPU


def run(
    names: Sequence[str],
    folder: str | Path,
    *,
    budget_seconds: float | None = None,
    scale: Scale | None = None,
    resume: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Results:
    """Runs suites in order, all of them where none is named; each case is on the disk as soon as it has ended.

    A case that fails, crashes or takes longer than its limit is recorded with its error, and the others go on. An
    interrupt ends the run and is raised again.

    Args:
        names: The suites, or lists of them. None named: all, or where a run is resumed those of that run.
        folder: Where the results file is written.
        budget_seconds: After this time no further case is begun.
        scale: How large the workloads are. None: as the device allows.
        resume: Go on with the last run in the folder that did not end: what it has measured stays.
        clock: Seconds, monotonic.

    Returns:
        The results, written.

    Raises:
        ValueError: There is no suite of that name.
        tfopt.errors.UnsupportedError: A package of the extra `bench` is missing.
        tfopt.errors.ResultsError: There is no run to resume, or it is of another machine, of other versions or suites.
        OSError: The folder cannot be written.
    """
    started = clock()
    suites.expand(names)
    unended = Results.unended(folder) if resume else None
    names = names or (unended.document["suites"] if unended else [])
    listed = isolated.call(_listed, _cases, names, scale, seconds=_LISTING_SECONDS)
    wanted = list(dict.fromkeys(row["suite"] for row in listed["cases"]))
    if unended:
        unended.go_on(wanted, listed["environment"])
    results = unended or Results(folder, wanted, listed["environment"], small=listed["small"])
    status = "interrupted"
    try:
        left = {at: row for at, row in enumerate(listed["cases"]) if not results.has(row)}
        with Progress(sum(row["ticks"] for row in left.values())) as progress:
            for at, row in left.items():
                if budget_seconds is not None and clock() - started > budget_seconds:
                    status = "out of budget"
                    break
                progress.start(f"{row['suite']} on {row['workload']}", row["ticks"])
                results.add(_outcome(row, progress, _cases, names, scale, at))
            else:
                status = "complete"
    finally:
        results.end(status)
    return results


def _cases(names: Sequence[str], scale: Scale | None) -> list[Case]:
    chosen = scale or default_scale()
    cases = [case for suite in suites.load(names) for case in suite.cases(chosen)]
    return [replace(case, repeats=min(case.repeats, chosen.repeats)) for case in cases]


def _listed(send: Callable[[Any], None], make: _Make, names: Sequence[str], scale: Scale | None) -> dict[str, Any]:
    """What a run would measure, and where: the process that waits touches no GPU, for its memory is the cases'."""
    rows = [
        {
            "suite": case.suite,
            "workload": case.workload,
            "question": case.question,
            "unit": case.unit,
            "baseline": case.variants[0].name,
            "ticks": case.ticks,
            "limit_seconds": case.limit_seconds,
        }
        for case in make(names, scale)
    ]
    return {"environment": environment(), "cases": rows, "small": (scale or default_scale()).resnet is None}


def _outcome(row: dict[str, Any], progress: Progress, *arguments: Any) -> dict[str, Any]:
    """The outcome of a case, or its error."""
    try:
        return isolated.call(_measured, *arguments, seconds=row["limit_seconds"], on_message=progress.tick)
    except Exception as error:  # noqa: BLE001  whatever a case does, the others are measured
        said = str(error) if isinstance(error, ProcessError) else f"{type(error).__name__}: {error}"
        kept = ("suite", "workload", "question", "unit", "baseline")
        return {**{name: row[name] for name in kept}, "variants": [], "error": said}


def _measured(
    send: Callable[[Any], None], make: _Make, names: Sequence[str], scale: Scale | None, at: int
) -> dict[str, Any]:
    outcome = {**make(names, scale)[at].run(send), "error": None}
    dumps(outcome)  # what is no JSON, such as a loss of NaN, is this case's failure
    return outcome
