"""Problems of files, and the reports that list them."""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, TypeVar

from tfopt.text import Shown

_SHOWN = 20

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file."""

    file: str
    """Its path."""
    kind: str
    """"missing", "empty", "cut", "altered", "longer", "extra", "index", "unreadable", "no image" or "unsupported"."""
    what: str
    """The problem in words."""
    record: int | None = None
    """Number of the record, from 0; None for the whole file, or if unknown."""
    offset: int | None = None
    """Byte at which the damage, or the damaged record, begins; None if unknown."""
    size_bytes: int | None = None
    """How many bytes do not read as records; None if unknown."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.file}: {self.what}"


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown):
    """What a look at files found; the base of the public reports."""

    files: int
    """How many files were looked for."""
    problems: tuple[Problem, ...]
    """What is wrong with them."""

    @property
    def passed(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return asdict(self) | {"passed": self.passed, "problems": [asdict(problem) for problem in self.problems]}


def listed(problems: Sequence[Problem]) -> str:
    """Returns a line for each of the first problems, and how many more there are."""
    more = [f"  and {len(problems) - _SHOWN:,} more"] * (len(problems) > _SHOWN)
    return "\n".join([*(f"  {problem}" for problem in problems[:_SHOWN]), *more])


def read_from(path: str, read: Callable[[BinaryIO], Found]) -> Found | Problem:
    """Returns what a function reads of a file; a problem if it is no file, or cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # unopened: opening a pipe can block
            return Problem(path, "unreadable", "a folder, a pipe or a device")
        with open(path, "rb") as file:
            return read(file)
    except OSError as error:
        return Problem(path, "unreadable", f"Cannot read it: {error.strerror}")


def head_of(path: str, count: int) -> bytes | Problem:
    """Returns the first bytes of a file; a problem if there are none."""
    return read_from(path, lambda file: file.read(count)) or Problem(path, "empty", "an empty file")
