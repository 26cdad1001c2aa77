"""A real job with TrainingCheckpoint is preempted twice, and ends as one that never was."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tfopt

pytestmark = pytest.mark.slow
TEMPLATE = Path(tfopt.__file__).parent / "distribute" / "templates" / "slurm.sh"
TRAINING = Path(__file__).with_name("train_preempted.py")
STEPS = 7  # of an epoch
RANKS = (0, 1)


def submit(slurm, folder, waits):
    folder.mkdir()
    return slurm.submit(TEMPLATE, sys.executable, TRAINING, folder, str(waits))


def ended(slurm, job, folder):
    """Waits for a job; returns how often it was restarted, and the weights and history of each worker."""
    end = slurm.ended(job, seconds=240)
    assert (end["JobState"], end["ExitCode"]) == ("COMPLETED", "0:0"), slurm.output(job)
    return int(end["Restarts"]), [dict(np.load(folder / f"ended{rank}.npz")) for rank in RANKS]


def test_goes_on_after_each_preemption(slurm, tmp_path):
    job = submit(slurm, tmp_path / "preempted", 2)
    for run, preempt in enumerate([("scancel", "--signal=TERM"), ("scontrol", "requeue")]):
        files = [tmp_path / "preempted" / f"waits {run} {rank}" for rank in RANKS]
        slurm.until(lambda files=files: all(file.exists() for file in files), job, seconds=180)
        slurm.command(*preempt, job)
    restarts, preempted = ended(slurm, job, tmp_path / "preempted")
    restarts_of_whole, whole = ended(slurm, submit(slurm, tmp_path / "whole", 0), tmp_path / "whole")

    assert (restarts, restarts_of_whole) == (2, 0)
    saved = [int(step) for step in re.findall(r"0: SIGTERM: saved step (\d+) to", slurm.output(job))]
    assert [step // STEPS for step in saved] == [0, 2], slurm.output(job)
    assert all(step % STEPS for step in saved), saved  # within an epoch
    for rank in RANKS:
        assert preempted[rank].keys() == whole[rank].keys()
        different = [name for name, value in whole[rank].items() if not np.array_equal(value, preempted[rank][name])]
        assert different == [], f"in worker {rank}"
