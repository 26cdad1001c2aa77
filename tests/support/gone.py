"""Waits for the end of a process that is no child of this one."""

import time
from pathlib import Path


def gone(pid, seconds=60):
    """Whether a process ends in time. A zombie has ended."""
    due = time.monotonic() + seconds
    while time.monotonic() < due:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False
