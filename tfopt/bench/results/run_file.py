"""Results files: the only place where a run is JSON. Written as the run goes, read back only if whole."""

import datetime
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_origin, get_type_hints

from tfopt.bench.results import (
    NEVER_BEGAN,
    UNDER_WAY,
    CaseResult,
    CommunicationResult,
    Run,
    VariantResult,
    metrics,
    verdict,
)
from tfopt.errors import ResultsError
from tfopt.files import write_atomic

SCHEMA = "tfopt-bench"
SCHEMA_VERSION = 1


class RunFile:
    """A run and its file. Every change is on disk when the call returns, so a killed run keeps what it measured."""

    def __init__(self, path: Path, run: Run):
        self.path = path
        self.run = run

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], suites: Sequence[str], environment: dict[str, Any], *, small: bool = False
    ) -> Self:
        """Starts a new file in a folder, named for the time."""
        now = datetime.datetime.now().astimezone()
        run = Run(started=now.isoformat(timespec="seconds"), suites=tuple(suites), small=small, environment=environment)
        created = cls(_reserved(Path(folder), now.strftime("%Y-%m-%dT%H-%M-%S")), run)
        created._write(run)
        return created

    @classmethod
    def earlier(cls, folder: str | os.PathLike[str], suites: Sequence[str]) -> Self | None:
        """Finds the last run of these suites (no suite: of any) with something left to measure, else the last one."""
        runs = [cls(path, read(path)) for path in sorted(Path(folder).glob("*.json")) if schema_of(path) == SCHEMA]
        candidates = [file for file in runs if not suites or set(file.run.suites) == set(suites)]
        left = [file for file in candidates if not file.run.done]
        return left[-1] if left else candidates[-1] if candidates else None

    def put(self, case: CaseResult) -> None:
        """Adds a case, or replaces what was there of it unless that has more turns.

        Raises:
            ValueError: If the case holds a NaN, which JSON cannot. The file stays as it was.
        """
        before = self.run.case(case.address)
        if before is not None and not case.done and before.turns > case.turns:
            return
        cases = [one for one in self.run.cases if one is not before]
        at = self.run.cases.index(before) if before else len(cases)
        self._write(replace(self.run, cases=(*cases[:at], case, *cases[at:])))

    def go_on(self, differences: Sequence[str]) -> None:
        """Notes that the run goes on, and how the environment differs by now."""
        self._write(replace(self.run, status="running", resumed=(*self.run.resumed, *differences)))

    def end(self, status: str, planned: Sequence[CaseResult] = ()) -> None:
        """Notes how the run ended, and which of the planned cases never began; they are put in the order planned."""
        cut = f"the run was {status}"
        of_run = [replace(c.with_metrics(), unfinished=cut) if c.unfinished == UNDER_WAY else c for c in self.run.cases]
        found = {case.address: replace(case, unfinished=NEVER_BEGAN) for case in planned}
        cases = (found | {case.address: case for case in of_run}).values()
        self._write(replace(self.run, status=status, cases=tuple(cases)))

    def _write(self, run: Run) -> None:
        write_atomic(self.path, dumps(run) + "\n")
        self.run = run


def dumps(run: Run) -> str:
    """Returns a run as JSON text."""
    return json.dumps(to_json(run), indent=1, ensure_ascii=False, allow_nan=False)


def to_json(run: Run) -> dict[str, Any]:
    """Returns a run as JSON values."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        **asdict(replace(run, cases=())),
        "cases": [_case_to_json(case) for case in run.cases],
    }


def _case_to_json(case: CaseResult) -> dict[str, Any]:
    found = asdict(replace(case, variants=()))
    found["variants"] = [_variant_to_json(variant) for variant in case.variants]
    if communication := case.communication:
        found["communication"]["expected_bytes_per_step"] = communication.expected_bytes_per_step
        found["communication"]["predictions"] = [asdict(each) for each in communication.predictions]
    return found


def _variant_to_json(variant: VariantResult) -> dict[str, Any]:
    found = asdict(variant)
    found["step_time"], stated = found.pop("times"), found.pop("metrics")
    if variant.times is None or variant.metrics is None:
        return found
    found["step_time"] |= {
        "median_ms": variant.times.median_ms,
        "interval_ms": stated.pop("interval_ms"),
        "examples_per_second": variant.times.examples_per_second,
    }
    for name in ("comparison", "of_ceiling"):
        comparison = getattr(variant.metrics, name)
        stated[name] = comparison and comparison.to_dict()
    return found | stated


def read(path: str | os.PathLike[str]) -> Run:
    """Reads a run and checks that it is whole.

    Raises:
        tfopt.errors.ResultsError: If it cannot be read, is truncated, has another schema, or states figures that do
            not follow from its raw samples.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(_unreadable(Path(path), error)) from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise ResultsError(
            f"Expected a results file of tfopt-bench. Found that {str(path)!r} is truncated or not JSON ({error}). "
            "Give a file that tfopt-bench wrote, or run it again."
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ResultsError(
            f"Expected a results file of tfopt-bench. Found another JSON document in {str(path)!r}. Give a file that "
            "tfopt-bench wrote."
        )
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ResultsError(
            f"Expected schema version {SCHEMA_VERSION}. Found {document.get('schema_version')!r} in {path}. "
            "Use the tfopt that wrote it, or run tfopt-bench again."
        )
    try:
        run = from_json(document)
        _check(document, run)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ResultsError(
            f"Expected a whole document, whose figures follow from its raw samples. Found in {path}: {error!r}. "
            "Run tfopt-bench again."
        ) from error
    return run


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"Expected a results file of tfopt-bench. No such file: {str(path)!r}."
    found = f"that {str(path)!r} is a folder" if path.is_dir() else f"{error.strerror}: {str(path)!r}"
    return f"Expected a results file of tfopt-bench. Found {found}. Give a file that tfopt-bench wrote."


def schema_of(path: Path) -> str | None:
    """Schema that a JSON file names; None for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("schema") if isinstance(document, dict) else None


def from_json(document: dict[str, Any]) -> Run:
    """Returns the run that JSON values state, figures included, without checking that these follow."""
    cases = [found | {"variants": list(map(_with_fields, found["variants"]))} for found in document["cases"]]
    run: Run = _from_json(Run, document | {"cases": cases})
    return replace(run, cases=tuple(map(_whole, run.cases)))


def _with_fields(found: dict[str, Any]) -> dict[str, Any]:
    """Adds the fields `times` and `metrics`, whose values lie elsewhere in a variant's JSON object."""
    times = found["step_time"]
    stated = times is not None and "verdict" in found
    return found | {"times": times, "metrics": found | {"interval_ms": times["interval_ms"]} if stated else None}


def _from_json(kind: Any, value: Any) -> Any:
    """Makes a value of an annotated type from JSON values. A field that an older run lacks has its default."""
    if isinstance(kind, UnionType):  # with None
        return None if value is None else _from_json(kind.__args__[0], value)
    if get_origin(kind) is tuple:
        return tuple(_from_json(kind.__args__[0], each) for each in value)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        stated = [field.name for field in fields(kind) if field.name in value]
        return kind(**{name: _from_json(kinds[name], value[name]) for name in stated})
    return value


def _whole(case: CaseResult) -> CaseResult:
    """Adds the figures of a case under way; a finished one must have them."""
    if case.done and not all(v.refused or (v.times and v.metrics) for v in case.variants):
        raise ValueError(f"{case.suite}/{case.workload} lacks figures")
    if not case.done and case.turns and not case.measured:
        return case.with_metrics()
    return replace(case, variants=tuple(_undecided(variant, case) for variant in case.variants))


def _undecided(variant: VariantResult, case: CaseResult) -> VariantResult:
    """A variant without the intervals and verdict that runs recorded before gave on too few turns."""
    few = variant.times is not None and variant.times.interval_ms is None
    return replace(variant, metrics=metrics(variant, case)) if few and variant.metrics else variant


def _check(document: dict[str, Any], run: Run) -> None:
    """Raises an error unless everything shown is there and follows from the samples."""
    environment = run.environment
    for text in (run.status, run.started, environment["tfopt"], *environment["packages"], *run.suites, *run.resumed):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a string")
    _ = environment["host"]["cpu_model"], environment["host"]["cpus"], run.gpus
    for stated, case in zip(document["cases"], run.cases, strict=True):
        _ = stated["error"]
        for found, variant in zip(stated["variants"], case.variants, strict=True):
            _ = found["check"]
            if "verdict" in found:
                _check_variant(found, variant, case)
        if case.communication and case.done:
            _check_communication(stated["communication"], case.communication, case)


def _check_variant(found: dict[str, Any], variant: VariantResult, case: CaseResult) -> None:
    place, stated, following = f"{case.suite}/{variant.name}", variant.metrics, metrics(variant, case)
    if stated is None or following is None or variant.times is None:
        raise ValueError(f"{place} has no samples")
    _expect(f"a median of {place}", found["step_time"]["median_ms"], variant.times.median_ms)
    for name in ("comparison", "of_ceiling"):
        one, other = getattr(stated, name), getattr(following, name)
        # Intervals are taken as stated: older runs have them from resampling.
        _expect(f"{name} of {place}", one and one.ratio, other and other.ratio)
    for name in ("mfu_percent", "joules_per_thousand_examples"):
        _expect(f"{name} of {place}", getattr(stated, name), getattr(following, name))
    few = variant.times.interval_ms is None  # runs recorded before gave a verdict all the same
    if not few and found["verdict"] != verdict(variant, case, stated.comparison):
        raise ValueError(f"{place} states that it is {found['verdict']!r}")
    peak = variant.peak_memory_mib
    if peak is not None and not 0 <= peak < math.inf:
        raise ValueError(f"{place} states a peak of {peak!r} MiB")


def _check_communication(found: dict[str, Any], communication: CommunicationResult, case: CaseResult) -> None:
    model = communication.model
    alone = next(variant.times for variant in case.variants if variant.ceiling)
    _expect("the step on one replica", model.compute_ms, alone.median_ms if alone else None)
    for each in found["predictions"]:
        count = each["replicas"]
        _expect(f"the step predicted for {count} replicas", each["step_ms"], model.step_ms(count))
        _expect(f"the efficiency predicted for {count} replicas", each["efficiency"], model.efficiency(count))
    expected = communication.expected_bytes_per_step
    _expect("the bytes expected per step", found["expected_bytes_per_step"], expected)


def _expect(what: str, stated: float | None, following: float | None) -> None:
    """Raises an error unless a stated figure is the one that follows."""
    if stated is None or following is None:
        follows = stated is following
    else:
        follows = abs(stated - following) <= 1e-9 * abs(following)
    if not follows:
        raise ValueError(f"{what} does not follow: {stated}")


def _reserved(folder: Path, stem: str) -> Path:
    """Creates an empty file in the folder, so that no other run takes its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        path = folder / f"{stem}{suffix}.json"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"Expected a free file name in {folder}. Found {stem}.json to {stem}-999.json taken.")
