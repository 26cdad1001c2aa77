"""Runs suites and records what they find."""

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.bench import suites
from tfopt.bench.cases import CPU, GPU, Case, Scale
from tfopt.bench.progress import Progress
from tfopt.bench.results import Results
from tfopt.measure import environment


def default_scale() -> Scale:
    """The size for this machine: larger where there is a GPU."""
    return GPU if tf.config.list_physical_devices("GPU") else CPU


def run(
    names: Sequence[str],
    folder: str | Path,
    *,
    budget_seconds: float | None = None,
    scale: Scale | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Results:
    """Runs suites in order, all of them where none is named; each case is on the disk as soon as it has ended.

    A case that fails is recorded with its error, and the others go on. An interrupt ends the run and is raised again.

    Args:
        names: The suites.
        folder: Where the results file is written.
        budget_seconds: After this time no further case is begun.
        scale: How large the workloads are. None: as the device allows.
        clock: Seconds, monotonic.

    Returns:
        The results, written.

    Raises:
        ValueError: There is no suite of that name.
        tfopt.errors.UnsupportedError: A package of the extra `bench` is missing.
        OSError: The folder cannot be written.
    """
    started = clock()
    chosen = scale or default_scale()
    cases: list[Case] = [case for suite in suites.load(names) for case in suite.cases(chosen)]
    results = Results(folder, list(dict.fromkeys(case.suite for case in cases)), environment())
    status = "interrupted"
    try:
        with Progress(sum(case.ticks for case in cases)) as progress:
            for case in cases:
                if budget_seconds is not None and clock() - started > budget_seconds:
                    status = "out of budget"
                    break
                results.add(_outcome(case, progress))
            else:
                status = "complete"
    finally:
        results.end(status)
    return results


def _outcome(case: Case, progress: Progress) -> dict[str, Any]:
    """The case's outcome, or its error."""
    progress.start(f"{case.suite} on {case.workload}", case.ticks)
    try:
        return {**case.run(progress.tick), "error": None}
    except Exception as error:  # noqa: BLE001  whatever a case does, the others are measured
        traceback.print_exc()
        return {
            "suite": case.suite,
            "workload": case.workload,
            "question": case.question,
            "unit": case.unit,
            "baseline": case.variants[0].name,
            "variants": [],
            "error": f"{type(error).__name__}: {error}",
        }
