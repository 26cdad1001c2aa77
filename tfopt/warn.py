"""Logs one warning per cause for the whole process.

Uses `logging`, not `warnings`: under `-W error` a warning raises, and in a sampler's thread nobody would catch it.
"""

import logging
import threading

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


def forget_warnings() -> None:
    """Forgets which warnings were logged. For tests."""
    with _lock:
        _given.clear()
