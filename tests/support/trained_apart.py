"""Runs trainings of tests/support in processes of their own: alone, or as workers of a launcher."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

SUPPORT = Path(__file__).parent


def start(script, *arguments, workers=0):
    """Starts a script; with `workers`, the launcher starts so many."""
    environ = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    environ |= {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), *sys.path])}
    launch = ["-m", "tfopt.distribute.launch", "-n", str(workers)] if workers else []
    command = [sys.executable, *launch, SUPPORT / script, *map(str, arguments)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(*started):
    """Waits for what was started, all of which must end well; returns what the last one printed."""
    try:
        for process in started:
            out, err = process.communicate(timeout=900)
            assert process.returncode == 0, out[-4000:] + err[-4000:]
    finally:
        for process in started:
            process.kill()
    return out


def distance(one, other):
    """The largest difference between two lists of arrays."""
    assert [np.shape(part) for part in one] == [np.shape(part) for part in other]
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(one, other, strict=True))
