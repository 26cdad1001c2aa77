"""Two processes that train together are interrupted at the same step, and go on as if they had not been."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfopt import checkpoint
from tfopt.checkpoint.folder.reading import read

SUPPORT = Path(__file__).parents[1] / "support"
RESTART = 75


def train(folder, *arguments):
    """Trains in two processes; returns the launcher's exit code and output."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [SUPPORT.parents[1], SUPPORT]))}
    environ.pop("TF_CONFIG", None)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tfopt.distribute.launch", "-n", "2", SUPPORT / "resumed_workers.py", folder]
    done = subprocess.run([*command, *arguments], env=environ, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def ended(folder):
    return [np.load(folder / f"ended{rank}.npz") for rank in (0, 1)]


MOMENTS = {
    "a step of the chief's": ("0", "step", "1", "1"),
    "a step of the other's": ("1", "step", "2", "1"),
    "its validation": ("1", "validation", "1", "1"),
    "between epochs": ("0", "epoch", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "moment"),
    [
        ("mixture", "a step of the other's"),
        ("dataset", "a step of the chief's"),
        ("arrays", "its validation"),
        ("pipeline", "between epochs"),
    ],
)
def test_both_leave_and_go_on_together(tmp_path, data, moment):
    code, said = train(tmp_path / "whole", data)
    assert code == 0, said[-4000:]
    code, said = train(tmp_path / "cut", data, *MOMENTS[moment])
    assert code == RESTART, said[-4000:]
    assert checkpoint.verify(tmp_path / "cut" / "saved").passed
    assert (read(tmp_path / "cut" / "saved").metadata["batch"] > 0) == ("step" in moment)
    code, said = train(tmp_path / "cut", data, *MOMENTS[moment])
    assert code == 0, said[-4000:]
    for whole, cut in zip(ended(tmp_path / "whole"), ended(tmp_path / "cut"), strict=True):
        assert whole.files == cut.files
        assert [name for name in whole.files if not np.array_equal(whole[name], cut[name])] == []
