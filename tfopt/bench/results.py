"""The document of a run: written as it goes, read back only if whole."""

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfopt.errors import ResultsError
from tfopt.files import write_atomic
from tfopt.measure import StepTimes, compare

SCHEMA = "tfopt-bench"
SCHEMA_VERSION = 1


class Results:
    """A run's document. Every change is on the disk at once, so that a run cut short keeps what it measured.

    Attributes:
        document: JSON: `schema`, `schema_version`, `started`, `status` ("running", "complete", "interrupted" or "out
            of budget"), `device`, `environment`, `suites`, and `cases` with their raw samples.
        path: Where it is written.
    """

    def __init__(self, folder: str | os.PathLike[str], suites: Sequence[str], environment: dict[str, Any]):
        now = datetime.datetime.now().astimezone()
        self.path = _free(Path(folder), now.strftime("%Y-%m-%dT%H-%M-%S"))
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "started": now.isoformat(timespec="seconds"),
            "status": "running",
            "suites": list(suites),
            "environment": environment,
            "cases": [],
        }
        self._write()

    def add(self, case: dict[str, Any]) -> None:
        """Adds a case's outcome."""
        self.document["cases"].append(case)
        self._write()

    def end(self, status: str) -> None:
        """Notes how the run ended."""
        self.document["status"] = status
        self._write()

    def _write(self) -> None:
        write_atomic(self.path, dumps(self.document) + "\n")


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
        for case in document["cases"]:
            _check(case)
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise ResultsError(
            f"Expected figures that follow from their raw samples. Found in {path}: {error!r}. Run tfopt-bench again."
        ) from error
    return document


def _check(case: dict[str, Any]) -> None:
    """Raises a ValueError unless medians and ratios are those of the samples. (Intervals are drawn at random.)"""
    if case.get("error") is not None:
        return
    times = {variant["name"]: StepTimes.from_dict(variant["step_time"]) for variant in case["variants"]}
    for variant in case["variants"]:
        name, stated, measured = variant["name"], variant["step_time"], times[variant["name"]]
        if not _near(stated["median_ms"], measured.median_ms):
            raise ValueError(f"{case['suite']}/{name} states a median of {stated['median_ms']} ms")
        comparison = variant["comparison"]
        if comparison and not _near(comparison["ratio"], compare(times[case["baseline"]], measured).ratio):
            raise ValueError(f"{case['suite']}/{name} states a ratio of {comparison['ratio']}")


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * abs(b)


def _free(folder: Path, stem: str) -> Path:
    """A file name in the folder that no run has taken."""
    names = (f"{stem}{suffix}.json" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(folder / name for name in names if not (folder / name).exists())
