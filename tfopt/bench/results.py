"""The document of a run: written as it goes, read back only if whole."""

import datetime
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tfopt.bench.figures import joules_per_thousand_examples, mfu_percent, verdict
from tfopt.bench.scaling import RingModel
from tfopt.errors import ResultsError
from tfopt.files import write_atomic
from tfopt.measure import Comparison, StepTimes, compare

SCHEMA = "tfopt-bench"
SCHEMA_VERSION = 1

_ALIKE = ("python", "packages", "driver", "cuda", "cudnn", "gpus", "host.cpu_model", "host.cpus")


class Results:
    """A run's document. Every change is on the disk at once, so that a run cut short keeps what it measured.

    Attributes:
        document: JSON: `schema`, `schema_version`, `started`, `status` ("running", "complete", "interrupted" or "out
            of budget"), `suites`, `small` (whether sizes are those for a machine without a GPU), `environment`, and
            `cases` with their raw samples.
        path: Where it is written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], suites: Sequence[str], environment: dict[str, Any], *, small: bool = False
    ):
        now = datetime.datetime.now().astimezone()
        self.path = _reserved(Path(folder), now.strftime("%Y-%m-%dT%H-%M-%S"))
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "started": now.isoformat(timespec="seconds"),
            "status": "running",
            "suites": list(suites),
            "small": small,
            "environment": environment,
            "cases": [],
        }
        self._write()

    @classmethod
    def unended(cls, folder: str | os.PathLike[str]) -> Self:
        """The last run in a folder that did not end.

        Raises:
            tfopt.errors.ResultsError: There is none, or it cannot be read.
        """
        paths = [path for path in sorted(Path(folder).glob("*.json")) if _status(path) not in (None, "complete")]
        if not paths:
            raise ResultsError(f"Expected in {folder} a run that did not end. Found none. Run without --resume.")
        results = cls.__new__(cls)
        results.path, results.document = paths[-1], read(paths[-1])
        return results

    def go_on(self, suites: Sequence[str], environment: dict[str, Any]) -> None:
        """Notes that the run goes on.

        Raises:
            tfopt.errors.ResultsError: It is of another machine, of other versions or of other suites.
        """
        unlike = differences(self.document["environment"], environment)
        if self.document["suites"] != list(suites):
            unlike.append(f"suites: {', '.join(self.document['suites'])} and {', '.join(suites)}")
        if unlike:
            raise ResultsError(
                f"Expected to go on where {self.path} was begun. Found {'; '.join(unlike)}. Run without --resume."
            )
        self.end("running")

    def has(self, case: dict[str, Any]) -> bool:
        """Whether a case was measured, without an error."""
        return any(_key(one) == _key(case) and one["error"] is None for one in self.document["cases"])

    def add(self, case: dict[str, Any]) -> None:
        """Adds a case's outcome, in place of that of a failure before."""
        dumps(case)  # raises an error, and leaves the document as it is, where that is no JSON
        self.document["cases"] = [one for one in self.document["cases"] if _key(one) != _key(case)] + [case]
        self._write()

    def end(self, status: str) -> None:
        """Notes how the run ended."""
        self.document["status"] = status
        self._write()

    def _write(self) -> None:
        write_atomic(self.path, dumps(self.document) + "\n")


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In what two environments are unlike, so that figures of the one say nothing of the other, in words."""
    return [
        f"{name}: {_part(before, name)} and {_part(after, name)}"
        for name in _ALIKE
        if _part(before, name) != _part(after, name)
    ]


def dumps(document: dict[str, Any]) -> str:
    """The document as JSON text."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a document and checks that it is whole.

    Raises:
        tfopt.errors.ResultsError: It cannot be read, is cut short, has another schema, or states figures that do not
            follow from its raw samples.
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
        _check(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ResultsError(
            f"Expected a whole document, whose figures follow from its raw samples. Found in {path}: {error!r}. "
            "Run tfopt-bench again."
        ) from error
    return document


def _check(document: dict[str, Any]) -> None:
    """Raises an error unless all that is shown is there and follows from the samples."""
    environment = document["environment"]
    for text in (document["status"], document["started"], environment["tfopt"], *environment["packages"]):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} stands where a text should")
    _ = environment["host"]["cpu_model"], environment["host"]["cpus"], [gpu["name"] for gpu in environment["gpus"]]
    for case in document["cases"]:
        _ = case["suite"], case["workload"], case["question"], case["unit"], case["error"]
        if case["error"] is None:
            _check_case(case)


def _check_case(case: dict[str, Any]) -> None:
    times = {variant["name"]: StepTimes.from_dict(variant["step_time"]) for variant in case["variants"]}
    for variant in case["variants"]:
        name, own = variant["name"], times[variant["name"]]
        place, baseline = f"{case['suite']}/{name}", None if name == case["baseline"] else times[case["baseline"]]
        _expect(f"a median of {place}", variant["step_time"]["median_ms"], own.median_ms)
        comparison = _comparison(f"the speed of {place}", variant["comparison"], baseline, own)
        if variant["verdict"] != verdict(variant, comparison):
            raise ValueError(f"{place} states that it is {variant['verdict']!r}")
        peak = variant.get("peak_memory_mib")  # older runs have none, nor what follows
        if peak is not None and not 0 <= peak < math.inf:
            raise ValueError(f"{place} states a peak of {peak!r} MiB")
        if "limit" in case:
            limit = None if case["limit"] is None or variant["ceiling"] else times[case["limit"]]
            _comparison(f"the share of the ceiling of {place}", variant["of_ceiling"], limit, own)
            _expect(f"the utilisation of {place}", variant["mfu_percent"], mfu_percent(variant, case, own))
            joules = joules_per_thousand_examples(variant, own)
            _expect(f"the energy of {place}", variant["joules_per_thousand_examples"], joules)
    if communication := case.get("communication"):  # older runs have none
        alone = next(times[variant["name"]] for variant in case["variants"] if variant["ceiling"])
        _check_communication(communication, alone)


def _comparison(
    what: str, stated: dict[str, Any] | None, baseline: StepTimes | None, times: StepTimes
) -> Comparison | None:
    """A stated comparison, if it follows. Its interval is taken as stated: NumPy may draw other resamples one day."""
    following = None if baseline is None else compare(baseline, times).ratio
    _expect(what, None if stated is None else stated["ratio"], following)
    if stated is None:
        return None
    low, high = stated["interval"]
    return Comparison(ratio=stated["ratio"], interval=(low, high))


def _check_communication(communication: dict[str, Any], alone: StepTimes) -> None:
    model, replicas = RingModel(**communication["model"]), communication["replicas"]
    _expect("the step on one replica", model.compute_ms, alone.median_ms)
    stated = [(each["replicas"], each["step_ms"], each["efficiency"]) for each in communication["predictions"]]
    for count, step_ms, efficiency in stated:
        _expect(f"the step predicted for {count} replicas", step_ms, model.step_ms(count))
        _expect(f"the efficiency predicted for {count} replicas", efficiency, model.efficiency(count))
    _expect("the bytes expected a step", communication["expected_bytes_per_step"], model.sent_bytes(replicas))


def _expect(what: str, stated: float | None, following: float | None) -> None:
    """Raises an error unless a figure follows."""
    if stated is None or following is None:
        follows = stated is following
    else:
        follows = abs(stated - following) <= 1e-9 * abs(following)
    if not follows:
        raise ValueError(f"{what} does not follow: {stated}")


def _part(environment: dict[str, Any], name: str) -> Any:
    value: Any = environment
    for key in name.split("."):
        value = value.get(key)
    return [gpu["name"] for gpu in value] if name == "gpus" else value


def _key(case: dict[str, Any]) -> tuple[str, str]:
    return case["suite"], case["workload"]


def _status(path: Path) -> str | None:
    """How the run in a file stands; None where it is no results file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("status") if isinstance(document, dict) and document.get("schema") == SCHEMA else None


def _reserved(folder: Path, stem: str) -> Path:
    """A new file in the folder, so that no other run takes its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        path = folder / f"{stem}{suffix}.json"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"Expected a free file name in {folder}. Found {stem}.json to {stem}-999.json taken.")
