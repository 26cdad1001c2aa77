"""Results files: the only place where a run is JSON. Written as the run goes, read back only if whole."""

import datetime
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tfopt.bench.results import (
    UNDER_WAY,
    CaseResult,
    Check,
    DeviceRates,
    GpuConditions,
    Metrics,
    Run,
    VariantResult,
    metrics,
    verdict,
)
from tfopt.bench.results.communication import Communication, RingModel
from tfopt.errors import ResultsError
from tfopt.files import write_atomic
from tfopt.measure import Comparison, StepTimes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")

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
        """Finds the run to go on with: the last one with something left to measure, else the last one.

        Args:
            folder: Where to look.
            suites: Only runs of these suites count. Empty: all runs do.
        """
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

    def end(self, status: str) -> None:
        """Notes how the run ended."""
        cut = f"the run was {status}"
        cases = [replace(c.with_metrics(), unfinished=cut) if c.unfinished == UNDER_WAY else c for c in self.run.cases]
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
        **{field.name: getattr(run, field.name) for field in fields(run) if field.name != "cases"},
        "cases": [_case_to_json(case) for case in run.cases],
    }


def _case_to_json(case: CaseResult) -> dict[str, Any]:
    found = {field.name: getattr(case, field.name) for field in fields(case)}
    communication = case.communication
    return found | {
        "ceilings": case.ceilings and asdict(case.ceilings),
        "communication": communication
        and asdict(communication)
        | {
            "expected_bytes_per_step": communication.expected_bytes_per_step,
            "predictions": [asdict(each) for each in communication.predictions],
        },
        "variants": [_variant_to_json(variant) for variant in case.variants],
    }


def _variant_to_json(variant: VariantResult) -> dict[str, Any]:
    found = asdict(variant)
    times, stated = found.pop("times"), variant.metrics
    del found["metrics"]
    found["step_time"] = times
    if variant.times is None or stated is None:
        return found
    times["median_ms"] = variant.times.median_ms
    times["interval_ms"] = stated.interval_ms
    times["examples_per_second"] = variant.times.examples_per_second
    return found | {
        "comparison": stated.comparison and stated.comparison.to_dict(),
        "verdict": stated.verdict,
        "of_ceiling": stated.of_ceiling and stated.of_ceiling.to_dict(),
        "mfu_percent": stated.mfu_percent,
        "joules_per_thousand_examples": stated.joules_per_thousand_examples,
    }


def read(path: str | os.PathLike[str]) -> Run:
    """Reads a run and checks that it is whole.

    Raises:
        tfopt.errors.ResultsError: If it cannot be read, is cut short, has another schema, or states figures that do
            not follow from its raw samples.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"Expected a results file of tfopt-bench. Found: {error}. Give an existing file.") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise ResultsError(
            f"Expected a results file of tfopt-bench. Found in {path}: text that is cut short or no JSON ({error}). "
            "Run tfopt-bench again."
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ResultsError(f"Expected a results file of tfopt-bench. Found another JSON document in {path}.")
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


def schema_of(path: Path) -> str | None:
    """Schema that a JSON file names; None for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("schema") if isinstance(document, dict) else None


def from_json(document: dict[str, Any]) -> Run:
    """Returns the run that JSON values state, figures included, without checking that these follow."""
    return _value(
        Run,
        document,
        suites=tuple(document["suites"]),
        resumed=tuple(document.get("resumed", ())),
        cases=tuple(map(_case_from_json, document["cases"])),
    )


def _case_from_json(found: dict[str, Any]) -> CaseResult:
    rates, gate, communication = found.get("ceilings"), found.get("gate"), found.get("communication")
    case = _value(
        CaseResult,
        found,
        error=found["error"],
        ceilings=None if rates is None else DeviceRates(**rates),
        gate=None if gate is None else tuple(gate),
        communication=communication and _value(Communication, communication, model=RingModel(**communication["model"])),
        variants=tuple(map(_variant_from_json, found["variants"])),
    )
    if case.done and not all(v.refused or (v.times and v.metrics) for v in case.variants):
        raise ValueError(f"{case.suite}/{case.workload} lacks figures")
    return case if case.done or not case.turns or case.measured else case.with_metrics()


def _variant_from_json(found: dict[str, Any]) -> VariantResult:
    check, conditions, times = found["check"], found.get("conditions"), found["step_time"]
    return _value(
        VariantResult,
        found,
        check=None if check is None else Check(**check | {"values": tuple(check["values"])}),
        conditions=None if conditions is None else _conditions_from_json(conditions),
        times=None if times is None else StepTimes.from_dict(times),
        metrics=None if times is None or "verdict" not in found else _metrics_from_json(found),
    )


def _conditions_from_json(found: dict[str, Any]) -> GpuConditions:
    clocks = found["sm_clock_mhz"]
    reasons = tuple(found["throttle_reasons"])
    return _value(GpuConditions, found, sm_clock_mhz=clocks and tuple(clocks), throttle_reasons=reasons)


def _metrics_from_json(found: dict[str, Any]) -> Metrics:
    return _value(
        Metrics,
        found,
        interval_ms=tuple(found["step_time"]["interval_ms"]),
        comparison=_comparison_from_json(found["comparison"]),
        of_ceiling=_comparison_from_json(found.get("of_ceiling")),
    )


def _comparison_from_json(found: dict[str, Any] | None) -> Comparison | None:
    return None if found is None else Comparison(ratio=found["ratio"], interval=tuple(found["interval"]))


def _value(kind: type[_Value], found: dict[str, Any], **given: Any) -> _Value:
    """Makes a dataclass of the values given and of those in a JSON object; what an older run lacks has its default."""
    stated = {field.name: found[field.name] for field in fields(kind) if field.name in found}
    return kind(**stated | given)


def _check(document: dict[str, Any], run: Run) -> None:
    """Raises an error unless everything shown is there and follows from the samples."""
    environment = run.environment
    for text in (run.status, run.started, environment["tfopt"], *environment["packages"], *run.suites, *run.resumed):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a string")
    _ = environment["host"]["cpu_model"], environment["host"]["cpus"], run.gpus
    for stated, case in zip(document["cases"], run.cases, strict=True):
        for found, variant in zip(stated["variants"], case.variants, strict=True):
            if "verdict" in found:
                _check_variant(found, variant, case)
        if case.communication and case.done:
            _check_communication(stated["communication"], case.communication, case)


def _check_variant(found: dict[str, Any], variant: VariantResult, case: CaseResult) -> None:
    place, stated, following = f"{case.suite}/{variant.name}", variant.metrics, metrics(variant, case)
    if stated is None or following is None or variant.times is None:
        raise ValueError(f"{place} has no samples")
    _expect(f"a median of {place}", found["step_time"]["median_ms"], variant.times.median_ms)
    for what, one, other in (
        ("speed", stated.comparison, following.comparison),
        ("share of the ceiling", stated.of_ceiling, following.of_ceiling),
    ):
        # Intervals are taken as stated: another NumPy may draw other resamples.
        _expect(f"the {what} of {place}", one.ratio if one else None, other.ratio if other else None)
    _expect(f"the utilisation of {place}", stated.mfu_percent, following.mfu_percent)
    joules = following.joules_per_thousand_examples
    _expect(f"the energy of {place}", stated.joules_per_thousand_examples, joules)
    if stated.verdict != verdict(variant, stated.comparison, is_baseline=variant.name == case.baseline):
        raise ValueError(f"{place} states that it is {stated.verdict!r}")
    peak = variant.peak_memory_mib
    if peak is not None and not 0 <= peak < math.inf:
        raise ValueError(f"{place} states a peak of {peak!r} MiB")


def _check_communication(found: dict[str, Any], communication: Communication, case: CaseResult) -> None:
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
