"""Kills trainings that save checkpoints, and records what is lost: nothing.

    PYTHONPATH=tests/support python benchmarks/checkpoint_kills.py [RESULTS.json]

Kills with SIGKILL after every call that changes the disk and in the middle of every write, and at 200 seeded moments,
most of them inside a write (tests/support/killed_trainings.py). After each kill all that was saved must be there, whole
and bit for bit, and a training that goes on must end as one that was never killed; otherwise this ends with an error.
"""

import json
import sys
import tempfile
from pathlib import Path

from killed_trainings import kill_at_calls, kill_at_moments

from tfopt.files import write_atomic
from tfopt.measure import environment

MOMENTS = 200


def main():
    """Kills, prints and writes."""
    with tempfile.TemporaryDirectory() as folder:
        calls = kill_at_calls(Path(folder) / "calls", 1)
        moments = kill_at_moments(Path(folder) / "moments", MOMENTS)
    document = {"calls": calls, "moments": moments, "lost": 0, "partly_read": 0}
    print(f"killed after {calls['kills']} calls and at {moments['kills']} moments: nothing lost, nothing read in part")
    if len(sys.argv) > 1:
        write_atomic(sys.argv[1], json.dumps({"environment": environment(), **document}, indent=1) + "\n")


if __name__ == "__main__":
    main()
