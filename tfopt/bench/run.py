"""Runs suites and records what they find: each case in a process of its own, each turn on disk as it ends."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rich.progress
import tensorflow as tf
from rich.console import Console

from tfopt.bench import isolated, suites
from tfopt.bench.cases import CPU, GPU, Case, Scale
from tfopt.bench.cases.measuring import measure
from tfopt.bench.isolated import ProcessError, ProcessTimeoutError
from tfopt.bench.results import CaseResult
from tfopt.bench.results.changes import differences
from tfopt.bench.results.run_file import RunFile
from tfopt.errors import ResultsError
from tfopt.measure import environment
from tfopt.xla.autotune_cache import share_cache

_LISTING_SECONDS = 300.0
_Make = Callable[[Sequence[str], Scale | None], list[Case]]


def run(
    names: Sequence[str],
    folder: str | Path,
    *,
    budget_seconds: float | None = None,
    scale: Scale | None = None,
    resume: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> RunFile:
    """Runs suites in order, all of them for no name, and writes each turn of each variant to disk as it ends.

    A case that fails, crashes or takes longer than its limit is recorded with its error and what it measured before,
    and the others go on. An interrupt ends the run and is raised again.

    Args:
        names: Suites, or lists of them. Empty: all, or those of the run that is resumed.
        folder: Where the results file is written.
        budget_seconds: Ends the run after this time. The case under way then takes fewer turns, and stays unfinished.
        scale: How large the workloads are. None: as the device allows.
        resume: Go on with the last run in the folder that has something left to measure. Cases that failed or are
            unfinished are measured again. With nothing left, nothing is measured; without an earlier run, one starts.
        clock: Seconds, monotonic.

    Returns:
        The run and its file.

    Raises:
        ValueError: If there is no suite of that name.
        tfopt.errors.UnsupportedError: If a package of the extra `bench` is missing.
        tfopt.errors.ResultsError: If the run to resume is of another machine or of other versions.
        OSError: If the folder cannot be written.
    """
    started = clock()
    share_cache()  # XLA's autotuning, 40 to 75 s for each large model on a GPU, is done once for all processes
    wanted = suites.expand(names)
    file = RunFile.earlier(folder, wanted if names else ()) if resume else None
    if file is not None:
        if file.run.done:
            print(f"tfopt-bench: {file.path} is complete: nothing is left to measure.", file=sys.stderr)
            return file
        names = names or file.run.suites
    listing: _Listing = isolated.call(_list, _cases, names, scale, seconds=_LISTING_SECONDS)
    if file is None:
        file = RunFile.create(folder, suites.expand(names), listing.environment, small=listing.small)
    else:
        _go_on(file, listing)
    tried = {case.address: case.done for case in file.run.cases}
    left = [case for case in listing.cases if not tried.get(case.planned.address)]
    # One that failed or never fits into the budget must not keep the others from being measured.
    left.sort(key=lambda case: case.planned.address in tried)
    status = "interrupted"
    try:
        progress = _Progress(sum(case.ticks for case in left))
        with progress.bar:
            enough = True
            for case in left:
                budget = math.inf if budget_seconds is None else budget_seconds - (clock() - started)
                if budget <= 0:
                    enough = False
                    break
                progress.start(case)
                enough = _measure(file, case, progress, budget, _cases, scale) and enough
        status = "complete" if enough else "out of budget"
    finally:
        file.end(status)
    return file


@dataclass(frozen=True, slots=True)
class _Listed:
    """A case of a run, as the process that waits for it sees it."""

    planned: CaseResult
    ticks: int  # how often its progress is reported
    limit_seconds: float


@dataclass(frozen=True, slots=True)
class _Listing:
    cases: list[_Listed]
    environment: dict[str, Any]
    small: bool


def default_scale() -> Scale:
    """Returns the size for this machine: larger with a GPU."""
    return GPU if tf.config.list_physical_devices("GPU") else CPU


def _cases(names: Sequence[str], scale: Scale | None) -> list[Case]:
    chosen = scale or default_scale()
    cases = [case for suite in suites.expand(names) for case in suites.load(suite).cases(chosen)]
    ordered = sorted(cases, key=lambda case: suites.position(names, (case.suite, case.workload)))
    return [replace(case, repeats=min(case.repeats, chosen.repeats)) for case in ordered]


def _list(send: Callable[[Any], None], make: _Make, names: Sequence[str], scale: Scale | None) -> _Listing:
    """Lists a run, in a process of its own: the one that waits touches no GPU, whose memory is the cases'."""
    cases = [
        _Listed(case.planned, len(case.variants) * (case.repeats + (case.judge is not None)), case.limit_seconds)
        for case in make(names, scale)
    ]
    return _Listing(cases, environment(), (scale or default_scale()).resnet is None)


def _go_on(file: RunFile, listing: _Listing) -> None:
    before = file.run.environment
    if found := differences(before, listing.environment, patches=False):
        raise ResultsError(
            f"Expected to go on where {file.path} was begun. Found {'; '.join(found)}. Run without --resume."
        )
    file.go_on(differences(before, listing.environment))


def _measure(
    file: RunFile, case: _Listed, progress: "_Progress", budget: float, make: _Make, scale: Scale | None
) -> bool:
    """Measures a case and records it, whatever becomes of it. Returns whether the budget sufficed."""
    so_far = case.planned

    def receive(message: tuple[CaseResult, str]) -> None:
        nonlocal so_far
        file.put(message[0])
        so_far = message[0]
        progress.tick(message[1])

    limit = min(budget, case.limit_seconds)
    try:
        result = isolated.call(_measured, make, case.planned.address, scale, budget, seconds=limit, on_message=receive)
        file.put(result)
    except Exception as error:  # noqa: BLE001  whatever a case does, the others are measured
        if isinstance(error, ProcessTimeoutError) and limit == budget:
            result = replace(so_far.with_metrics(), unfinished="the budget ran out")
        else:
            said = str(error) if isinstance(error, ProcessError) else f"{type(error).__name__}: {error}"
            result = replace(so_far.with_metrics(), unfinished=None, error=said)
        file.put(result)
    return result.unfinished is None


def _measured(
    send: Callable[[Any], None], make: _Make, address: tuple[str, str], scale: Scale | None, seconds: float
) -> CaseResult:
    case = next(case for case in make([address[0]], scale) if (case.suite, case.workload) == address)
    return measure(case, lambda result, variant: send((result, variant)), seconds=seconds)


class _Progress:
    """A progress bar on standard error; without a terminal, a line for each case."""

    def __init__(self, total: int):
        self._console = Console(file=sys.stderr)
        columns = [
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.percentage:>3.0f} %"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.description}"),
        ]
        hidden = not self._console.is_terminal
        self.bar = rich.progress.Progress(*columns, console=self._console, transient=True, disable=hidden)
        self._task = self.bar.add_task("starting", total=total)
        self._case = ""
        self._end = 0.0

    def start(self, case: _Listed) -> None:
        """Begins a case; ticks missing from the one before, which failed, are skipped."""
        self._case = " on ".join(case.planned.address)
        self.bar.update(self._task, completed=self._end, description=self._case)
        self._end += case.ticks
        if not self._console.is_terminal:
            self._console.print(f"{self._case} …", highlight=False)

    def tick(self, variant: str) -> None:
        """Notes that a part of the case is done."""
        self.bar.update(self._task, advance=1, description=f"{self._case}: {variant}")
