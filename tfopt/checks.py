"""Checks of what callbacks are given: better when they are made than after hours of training."""

import math
import os
from numbers import Integral, Real
from pathlib import Path
from typing import Any


def number(name: str, value: Any, remedy: str, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """Returns a finite number, Python's or NumPy's, as a float.

    Args:
        name: The argument's.
        value: What was given for it.
        remedy: What to give, as a sentence.
        above: It must be above this.
        least: It must not be below this.

    Raises:
        TypeError: It is no number; True and False are none.
        ValueError: It is not finite, too large for a float, or too low.

    Example:
        >>> number("for_seconds", 60, "Give seconds.", above=0)
        60.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Expected {name} to be a number. Received: {value!r}. {remedy}")
    try:
        given = float(value)
    except OverflowError as error:
        raise ValueError(f"Expected {name} to be a finite number. Received: one beyond 1e308. {remedy}") from error
    if not math.isfinite(given):
        raise ValueError(f"Expected {name} to be a finite number. Received: {value!r}. {remedy}")
    if given <= above:
        raise ValueError(f"Expected {name} to be above {above:g}. Received: {value!r}. {remedy}")
    if given < least:
        raise ValueError(f"Expected {name} to be at least {least:g}. Received: {value!r}. {remedy}")
    return given


def integer(name: str, value: Any, remedy: str, *, least: int, most: float = math.inf) -> int:
    """Returns an integer, Python's or NumPy's.

    Args:
        name: The argument's.
        value: What was given for it.
        remedy: What to give, as a sentence.
        least: It must not be below this.
        most: It must not be above this.

    Raises:
        TypeError: It is no integer; True and False are none.
        ValueError: It is too low or too high.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"Expected {name} to be an integer. Received: {value!r}. {remedy}")
    given = int(value)
    if not least <= given <= most:
        bounds = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"Expected {name} to be {bounds}. Received: {value!r}. {remedy}")
    return given


def count(name: str, value: Any, remedy: str, *, least: int = 1) -> int:
    """Returns a number of steps, batches or the like; a ValueError covers everything that is not one.

    Args:
        name: The argument's.
        value: What was given for it.
        remedy: What to give, as a sentence.
        least: It must not be below this.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"Expected {name} to be an integer of at least {least}. Received: {name}={value!r}. {remedy}")
    return int(value)


def path(name: str, value: Any, remedy: str) -> Path:
    """Returns a local path, of something that may be there or not.

    Args:
        name: The argument's.
        value: What was given for it.
        remedy: What to give, as a sentence.

    Raises:
        TypeError: It is no path.
        ValueError: It is an address, or no path that the file system can have, as one that is too long.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"Expected {name} to be a path. Received: {value!r}. {remedy}")
    if "://" in text:
        raise ValueError(f"Expected {name} to be a local path. Received: {value!r}. Copy what is there afterwards.")
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass  # it may be made until fit begins
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        shown = text if len(text) <= 80 else f"{text[:80]}…"
        raise ValueError(f"Expected {name} to be a path. Received: {shown!r} ({cause}). {remedy}") from error
    return Path(text)


def folder(name: str, value: Any, remedy: str) -> Path:
    """Returns the path of a folder, which need not be there yet; raises as `path` does, and for a file."""
    found = path(name, value, remedy)
    if found.exists() and not found.is_dir():
        raise ValueError(f"Expected {name} to be a folder. Received: {os.fspath(found)!r}, which is a file. {remedy}")
    return found


def file(name: str, value: Any, remedy: str) -> Path:
    """Returns the path of a file, which need not be there yet; raises as `path` does, and for a folder."""
    found = path(name, value, remedy)
    if found.is_dir():  # the current one, for an empty text
        raise ValueError(f"Expected {name} to be a file. Received: {os.fspath(value)!r}, which is a folder. {remedy}")
    return found


def log_folder(log_dir: Any) -> Path | None:
    """Returns the folder for a logger's files, or None where it shall write none; raises as `folder` does."""
    return None if log_dir is None else folder("log_dir", log_dir, "Name a folder for the files.")
