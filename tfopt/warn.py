"""Warnings: logged once per cause for the whole process, or raised at the user's own line.

`warn_once` uses `logging`, not `warnings`: under `-W error` a warning raises, and in a sampler's thread nobody would
catch it.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Iterable

_logger = logging.getLogger("tfopt")
_lock = threading.Lock()
_given: set[str] = set()


def warn_once(cause: str, text: str, *, error: BaseException | None = None) -> None:
    """Logs `text` as a warning, unless one with the same cause was already logged in this process.

    Args:
        cause: What went wrong, as a key: `"driver_not_loaded"`, `"gpu_is_lost GPU-…"`.
        text: What was expected, what was found, what to do.
        error: Logged with its traceback, for a defect in the caller's code.
    """
    with _lock:
        if cause in _given:
            return
        _given.add(cause)
    _logger.warning("%s", text, exc_info=error)


def warned() -> frozenset[str]:
    """Returns the causes of the warnings logged so far, for `inherit_warnings` in another process."""
    with _lock:
        return frozenset(_given)


def inherit_warnings(causes: Iterable[str]) -> None:
    """Counts warnings that another process has logged as logged in this one."""
    with _lock:
        _given.update(causes)


def warn_caller(text: str) -> None:
    """Gives a `UserWarning` that shows the line of the user's code that led here, not one of tfopt's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tfopt":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def forget_warnings() -> None:
    """Forgets which warnings were logged. For tests."""
    with _lock:
        _given.clear()
