"""Argument checks, made when an object is constructed and not after hours of training.

Each takes the argument's name, the value passed, and a remedy: a sentence that says what to pass instead.
"""

import math
import os
from numbers import Integral, Real
from pathlib import Path
from typing import Any


def number(name: str, value: Any, remedy: str, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """Returns a finite number as a float; takes Python's and NumPy's numbers.

    Raises:
        TypeError: If `value` is not a number, or is a bool.
        ValueError: If `value` is not finite, is too large for a float, is not above `above` or is below `least`.

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
    """Returns an integer; takes Python's and NumPy's integers.

    Raises:
        TypeError: If `value` is not an integer, or is a bool.
        ValueError: If `value` is below `least` or above `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"Expected {name} to be an integer. Received: {value!r}. {remedy}")
    given = int(value)
    if not least <= given <= most:
        bounds = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"Expected {name} to be {bounds}. Received: {value!r}. {remedy}")
    return given


def count(name: str, value: Any, remedy: str, *, least: int = 1) -> int:
    """Returns a number of steps, batches or the like.

    Raises:
        ValueError: If `value` is not an integer of at least `least`, whatever its type.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"Expected {name} to be an integer of at least {least}. Received: {name}={value!r}. {remedy}")
    return int(value)


def path(name: str, value: Any, remedy: str) -> Path:
    """Returns a local path, which may or may not exist.

    Raises:
        TypeError: If `value` is not a path.
        ValueError: If `value` is a URL, or no valid path, such as one that is too long.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"Expected {name} to be a path. Received: {value!r}. {remedy}")
    if "://" in text:
        raise ValueError(f"Expected {name} to be a local path. Received: {value!r}. Copy the files there afterwards.")
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass  # it may be created before fit begins
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        shown = text if len(text) <= 80 else f"{text[:80]}…"
        raise ValueError(f"Expected {name} to be a path. Received: {shown!r} ({cause}). {remedy}") from error
    return Path(text)


def folder(name: str, value: Any, remedy: str) -> Path:
    """Returns the path of a folder, which need not exist yet; raises what `path` does, and ValueError for a file."""
    found = path(name, value, remedy)
    if found.exists() and not found.is_dir():
        raise ValueError(f"Expected {name} to be a folder. Received: {os.fspath(found)!r}, which is a file. {remedy}")
    return found


def file(name: str, value: Any, remedy: str) -> Path:
    """Returns the path of a file, which need not exist yet; raises what `path` does, and ValueError for a folder."""
    found = path(name, value, remedy)
    if found.is_dir():  # an empty string means the current folder
        raise ValueError(f"Expected {name} to be a file. Received: {os.fspath(value)!r}, which is a folder. {remedy}")
    return found


def log_folder(log_dir: Any) -> Path | None:
    """Returns the folder for a logger's files, or None for a logger that writes none; raises what `folder` does."""
    return None if log_dir is None else folder("log_dir", log_dir, "Name a folder for the files.")
