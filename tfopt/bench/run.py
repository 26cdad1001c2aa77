"""Runs suites and records what they find: each case in a process of its own, each turn on disk as it ends.

The process that waits for the others loads no TensorFlow, so that it answers at once and leaves the GPU alone.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfopt.bench import isolated, suites
from tfopt.bench.isolated import ProcessError, ProcessTimeoutError
from tfopt.bench.progress import Progress, duration
from tfopt.bench.results import NEVER_BEGAN, CaseResult
from tfopt.bench.results.changes import differences
from tfopt.bench.results.run_file import RunFile
from tfopt.errors import ResultsError, UnsupportedError
from tfopt.hardware.host_activity import OtherProcesses
from tfopt.warn import inherit_warnings, warned

if TYPE_CHECKING:
    from tfopt.bench.cases import Case, Scale

    _Make = Callable[[Sequence[str], Scale | None], list[Case]]

_LISTING_SECONDS = 300.0
_BUSY_PERCENT = 25.0  # of the CPUs, taken by other programs
_WAIT_SHARE = 0.05  # of the run's time, for them to stop
_LEAST_WAIT_SECONDS = 2.0
_LOOK_SECONDS = 0.3


def run(
    names: Sequence[str],
    folder: str | Path,
    *,
    budget_seconds: float | None = None,
    scale: "Scale | None" = None,
    resume: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> RunFile:
    """Runs suites in order, by default those of `tfopt-bench`, and writes each turn of each variant to disk as it ends.

    A case that fails, crashes or takes longer than its limit is recorded with its error and what it measured before,
    and the others go on. An interrupt ends the run and is raised again.

    Args:
        names: Suites, lists of them, or single cases ("stack/photos"). Empty: all suites, or what a resumed run was
            asked for.
        folder: Where the results file is written.
        budget_seconds: Ends the run after this time. The cases share it: where time is short, all take fewer turns,
            each suite's first case before any suite's second, and those that never began are listed.
        scale: How large the workloads are. None: as the device allows.
        resume: Resume the last run in the folder that has something left to measure. Unfinished cases keep their turns;
            those that failed are measured again. With nothing left, nothing is measured; without an earlier run, one
            starts.
        clock: Seconds, monotonic.

    Returns:
        The run and its file.

    Raises:
        ValueError: If there is no suite of that name.
        tfopt.errors.UnsupportedError: If a package of the extra `bench` is missing, or there is no case of that name
            on this device.
        tfopt.errors.ResultsError: If the run to resume is of another machine or of other versions.
        OSError: If the folder cannot be written.
    """
    started = clock()
    at_most = math.inf if budget_seconds is None else budget_seconds
    file = RunFile.earlier(folder, suites.spell_out(names) if names else ()) if resume else None
    asked, names = names, names or (file.run.suites if file is not None else ())
    begun = {case.suite for case in file.run.cases if case.unfinished != NEVER_BEGAN} if file is not None else set()
    expected = sum(suites.seconds(suite) for suite in suites.expand(names) if suite not in begun)
    progress = Progress(expected, at_most=at_most)
    if file is not None and file.run.done:
        progress.say(f"tfopt-bench: {file.path} is complete: nothing is left to measure.")
        return file
    if file is not None:
        progress.say(f"tfopt-bench: resuming {file.path}.")
    with progress:
        listing: _Listing = isolated.call(_list, _cases, names, scale, seconds=_LISTING_SECONDS, on_line=progress.say)
        _require_cases(asked, listing.addresses)
        os.environ |= listing.variables
        resumed = file is not None
        if file is None:
            measured = ", ".join(names or suites.expand(names))
            progress.say(f"tfopt-bench measures {measured}: {duration(min(expected, at_most))}.")
            file = RunFile.create(folder, suites.spell_out(names), listing.environment, small=listing.small)
        else:
            _go_on(file, listing)
        left = _left(listing.cases, file)
        if budget_seconds is not None and len(set(suites.expand(names))) == len(suites.spell_out(names)):
            left = _each_suite_first(left)
        expected = progress.plan([case.seconds for case in left])
        if resumed:
            unfinished = ", ".join(dict.fromkeys(case.planned.suite for case in left))
            progress.say(f"Remaining: {unfinished} ({duration(min(expected, at_most))}).")
        status = "interrupted"
        try:
            measuring = _Measuring(file, progress, lambda: at_most - (clock() - started), _cases, scale)
            status = "complete" if measuring.all_of(left, expected) else "out of budget"
        finally:
            file.end(status, [case.planned for case in listing.cases])
            if status == "interrupted":
                progress.say(f"Saved to {file.path}. To resume:\n{resume_command(folder)}")
    return file


def resume_command(folder: str | Path) -> str:
    """The command that measures what is left of the last run in a folder."""
    return f"tfopt-bench run --resume --output {folder}"


def _wait_for_quiet(say: Callable[[str], None], seconds: float) -> float:
    """Waits until other programs leave the CPUs alone, but not for longer than this. Returns how long it waited."""
    began, said, waited = time.monotonic(), False, 0.0
    if seconds < _LEAST_WAIT_SECONDS:
        return waited
    while (waited := time.monotonic() - began) < seconds:
        others = OtherProcesses()
        time.sleep(_LOOK_SECONDS)
        percent = others.cpu_percent()
        if percent is None or percent < _BUSY_PERCENT:
            break
        if not said:
            said = True
            say(f"Waiting up to {seconds:.0f} s for other programs, which take {percent:.0f} % of the CPUs.")
    return waited


@dataclass(frozen=True, slots=True)
class _Listed:
    """A case of a run, as the process that waits for it sees it."""

    planned: CaseResult
    seconds: float  # what it takes on two CPU cores, about
    limit_seconds: float


@dataclass(frozen=True, slots=True)
class _Listing:
    cases: list[_Listed]
    addresses: list[tuple[str, str]]  # of all cases that their suites have here
    environment: dict[str, Any]
    small: bool
    variables: dict[str, str]  # of the environment, for the processes of the cases


def default_scale() -> "Scale":
    """Returns the size for this machine: larger with a GPU."""
    import tensorflow as tf

    from tfopt.bench.cases import CPU, GPU

    return GPU if tf.config.list_physical_devices("GPU") else CPU


def _cases(names: Sequence[str], scale: "Scale | None") -> "list[Case]":
    chosen = scale or default_scale()
    cases = [case for suite in suites.expand(names) for case in suites.load(suite).cases(chosen)]
    placed = [(suites.position(names, (case.suite, case.workload)), case) for case in cases]
    ordered = sorted(((place, case) for place, case in placed if place is not None), key=lambda pair: pair[0])
    return [replace(case, repeats=min(case.repeats, chosen.repeats)) for _, case in ordered]


def _list(send: Callable[[Any], None], make: "_Make", names: Sequence[str], scale: "Scale | None") -> _Listing:
    """Lists a run, in a process of its own."""
    from tfopt.measure import environment
    from tfopt.xla.autotune_cache import share_cache

    share_cache()  # XLA's autotuning, 40 to 75 s for each large model on a GPU, is done once for all processes
    addresses = [case.planned.address for case in make(suites.expand(names), scale)]
    of_suite = Counter(suite for suite, _ in addresses)
    cases = make(names, scale)
    listed = [_Listed(one.planned, suites.seconds(one.suite) / of_suite[one.suite], one.limit_seconds) for one in cases]
    variables = {name: os.environ[name] for name in ("XLA_FLAGS",) if name in os.environ}
    return _Listing(listed, addresses, environment(), (scale or default_scale()).resnet is None, variables)


def _require_cases(names: Sequence[str], addresses: Sequence[tuple[str, str]]) -> None:
    """Raises UnsupportedError unless each case that a user named is among those that there are on this device."""
    for name in names:
        suite, slash, workload = name.partition("/")
        if slash and (suite, workload) not in addresses:
            known = ", ".join(repr(f"{suite}/{one}") for its, one in addresses if its == suite)
            raise UnsupportedError(f"Expected a case of {suite!r} on this device: {known}. Received: {name!r}.")


def _go_on(file: RunFile, listing: _Listing) -> None:
    before = file.run.environment
    if found := differences(before, listing.environment, patches=False):
        raise ResultsError(
            f"Expected the machine and versions with which {file.path} was started. Found {'; '.join(found)}. Run "
            "without --resume."
        )
    file.go_on(differences(before, listing.environment))


def _left(cases: Sequence[_Listed], file: RunFile) -> list[_Listed]:
    """Returns the cases that are not done, those never tried first: others may fail again, or never fit the budget."""
    tried = {case.address: case.done for case in file.run.cases if case.unfinished != NEVER_BEGAN}
    left = [case for case in cases if not tried.get(case.planned.address)]
    return sorted(left, key=lambda case: case.planned.address in tried)


def _each_suite_first(cases: Sequence[_Listed]) -> list[_Listed]:
    """The first case of each suite, then the second of each, and so on."""
    before: Counter[str] = Counter()
    placed = []
    for case in cases:
        placed.append((before[case.planned.suite], case))
        before[case.planned.suite] += 1
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


class _Measuring:
    """Measures cases and records them.

    Args:
        file: Where to.
        progress: What says how far it is.
        seconds_left: Returns what is left of the budget.
        make: Makes the cases, in their processes.
        scale: As for `make`.
    """

    def __init__(
        self,
        file: RunFile,
        progress: Progress,
        seconds_left: Callable[[], float],
        make: "_Make",
        scale: "Scale | None",
    ):
        self._file, self._progress, self._seconds_left = file, progress, seconds_left
        self._make, self._scale = make, scale
        self._warned: frozenset[str] = frozenset()  # causes that no further case warns of

    def all_of(self, left: Sequence[_Listed], expected: float) -> bool:
        """Measures these cases, which take about `expected` seconds. Returns whether the budget sufficed."""
        enough, waited = True, 0.0
        for at, case in enumerate(left):
            budget = self._seconds_left()
            if budget <= 0:
                return False
            waited += _wait_for_quiet(self._progress.say, _WAIT_SHARE * min(budget, expected) - waited)
            self._progress.start(" on ".join(case.planned.address), case.seconds)
            enough = self._one(case, budget, self._part(budget, left[at:])) and enough
        return enough

    def _part(self, budget: float, left: Sequence[_Listed]) -> float:
        """What the first of the cases that are left may take: what the others do not need, but at least its share."""
        if budget == math.inf:
            return budget
        first, *others = (case.seconds for case in left)
        return max(budget * first / (first + sum(others)), budget - self._progress.pace * sum(others))

    def _one(self, case: _Listed, budget: float, part: float) -> bool:
        """Measures a case in its part of the budget, whatever becomes of it. Returns whether that sufficed."""
        earlier = self._file.run.case(case.planned.address)
        so_far = earlier if earlier is not None and earlier.unfinished else case.planned

        def receive(message: tuple[CaseResult, str]) -> None:
            nonlocal so_far
            self._file.put(message[0])
            so_far = message[0]
            self._progress.tick(message[1])

        limit = min(budget, case.limit_seconds)
        arguments = self._make, case.planned.address, self._scale, part, earlier, self._warned
        say = self._progress.say
        try:
            found = isolated.call(_measured, *arguments, seconds=limit, on_message=receive, on_line=say)
            result, self._warned = found
            self._file.put(result)
        except Exception as error:  # noqa: BLE001  whatever a case does, the others are measured
            if isinstance(error, ProcessTimeoutError) and limit == budget:
                result = replace(so_far.with_metrics(), unfinished="the budget ran out")
            else:
                said = str(error) if isinstance(error, ProcessError) else f"{type(error).__name__}: {error}"
                result = replace(so_far.with_metrics(), unfinished=None, error=said)
            self._file.put(result)
        return result.unfinished is None


def _measured(
    send: Callable[[Any], None],
    make: "_Make",
    address: tuple[str, str],
    scale: "Scale | None",
    seconds: float,
    earlier: CaseResult | None,
    causes: frozenset[str],
) -> tuple[CaseResult, frozenset[str]]:
    from tfopt.bench.cases.measuring import measure

    inherit_warnings(causes)
    case = next(case for case in make([address[0]], scale) if (case.suite, case.workload) == address)
    kept = earlier if case.keeps(earlier) else None
    return measure(case, lambda result, variant: send((result, variant)), earlier=kept, seconds=seconds), warned()
