"""Real trainings on two nodes of a real Slurm, and one that resumes after a node's processes were killed."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

import tfopt

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
TEMPLATE = Path(tfopt.__file__).parent / "distribute" / "templates" / "slurm.sh"
TRAINING = Path(__file__).with_name("train.py")


def kill_node(job, node):
    """Kills all of a job's processes on a node."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            if (environ.get("SLURM_JOB_ID"), environ.get("SLURMD_NODENAME")) == (job, node):
                os.kill(process.pid, signal.SIGKILL)


def test_a_script_trains_on_two_nodes(slurm):
    said = slurm.srun("-N2", "-n2", "--label", sys.executable, ROOT / "examples" / "distributed.py")
    for rank, host in enumerate(["n9", "n10"]):
        assert f"{rank}: worker {rank} ({host}:" in said
        assert f"{rank}: 2 replicas: test accuracy 9" in said


def test_a_job_resumes_after_a_nodes_processes_were_killed(slurm, tmp_path):
    job = slurm.submit(TEMPLATE, sys.executable, TRAINING, tmp_path)
    slurm.until(lambda: (tmp_path / "3.weights.h5").exists(), job)
    kill_node(job, "n10")
    slurm.until(lambda: slurm.show(job)["Restarts"] == "1", job, seconds=90)
    assert "srun: error: n9: task 0: Exited with exit code 75" in slurm.output(job)
    assert "0: Expected worker 1 (n10:" in slurm.output(job)
    end = slurm.ended(job, seconds=180)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "1"), slurm.output(job)
    done = int(slurm.output(job).rpartition("going on after epoch ")[2].split()[0])
    assert done >= 3
    assert slurm.output(job).count(f": trained to epoch {done + 3}\n") == 2


def test_an_error_in_one_worker_fails_the_job(slurm):
    program = "[ $SLURM_PROCID = 1 ] && exit 3; sleep 1; exit 75"
    job = slurm.submit(TEMPLATE, "bash", "-c", program)
    end = slurm.ended(job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "200:0", "0"), slurm.output(job)
    assert "1: task 1 on n10 failed with exit code 3\n" in slurm.output(job)
