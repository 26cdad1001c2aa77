"""The fixture `slurm`: a real Slurm of two nodes, for the session."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from two_nodes import DEADLINE, two_nodes, why_not

ROOT = Path(__file__).parents[3]
# States of a job on its way, such as SIGNALING, come and go; only these are final.
FINAL = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


class Slurm:
    """Runs steps and jobs of Python programs that can import tfopt."""

    def __init__(self, environ, folder):
        self.environ = environ | {"PYTHONPATH": str(ROOT)}
        self.folder = folder

    def srun(self, *arguments):
        """Runs a step and returns its output."""
        step = self._call("srun", "--quiet", *arguments)  # otherwise it reports waiting for another step
        assert step.returncode == 0, step.stdout + step.stderr
        return step.stdout + step.stderr

    def python(self, program, *options):
        """Runs a program in each task of a step and returns the lines of output."""
        return self.srun("--overcommit", *options, sys.executable, "-c", program).splitlines()

    def submit(self, *arguments):
        """Submits a job and returns its number; `output` returns what it writes."""
        job = self._call("sbatch", "--parsable", f"--output={self.folder}/%j.out", *arguments)
        assert job.returncode == 0, job.stderr
        return job.stdout.strip()

    def output(self, job):
        """A job's output so far."""
        file = self.folder / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def show(self, job):
        """What Slurm knows of a job: {"JobState": "RUNNING", …}."""
        answer = self._call("scontrol", "--oneliner", "show", "job", job)
        return dict(part.split("=", 1) for part in answer.stdout.split() if "=" in part)

    def until(self, reached, job, seconds=DEADLINE):
        """Waits for something a job does."""
        due = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < due, f"{self.show(job)}\n{self.output(job)}"
            time.sleep(0.1)

    def ended(self, job, seconds=DEADLINE):
        """Waits until a job has finally ended and returns what Slurm knows of it."""
        self.until(lambda: self.show(job)["JobState"] in FINAL, job, seconds)
        return self.show(job)

    def command(self, *command):
        """Runs a command of Slurm's, such as scancel."""
        done = self._call(*command)
        assert done.returncode == 0, done.stdout + done.stderr

    def _call(self, *command):
        return subprocess.run(command, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="session")
def slurm():
    if why_not():
        pytest.skip(f"no Slurm: {why_not()}")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = two_nodes(Path(folder))
        try:
            environ = nodes.__enter__()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"Slurm does not start here: {error}")
        try:
            yield Slurm(environ, Path(folder))
        finally:
            nodes.__exit__(None, None, None)
