"""Real trainings in several processes with faults injected: each ends and names the lost worker."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from quick import campaign
from watched_workers import ROOT, Workers, free_addresses

from tfopt import distribute
from tfopt.errors import ClusterError

TRAINING = ROOT / "tests" / "support" / "distributed_endless.py"
DEADLINE = 180  # seconds; only keeps a failing test from hanging, since TensorFlow loads slowly


class Trainings(Workers):
    """Starts workers that train."""

    def start_both(self, *options, **seconds):
        """Starts two, waits until both are in the middle of fit, and returns their addresses."""
        addresses = free_addresses(2)
        for index in range(2):
            self.start_training(addresses, index, TRAINING, *options, **seconds)
        for index in range(2):
            self.until(lambda index=index: "step 10\n" in self.said(index), index)
        return addresses

    def until(self, reached, index):
        """Waits for something one of them does."""
        due = time.monotonic() + DEADLINE
        while not reached():
            ended = self.processes[index].poll()
            assert ended is None, f"worker {index} ended with {ended}: {self.said(index, 'stderr')[-4000:]}"
            assert time.monotonic() < due, f"worker {index} hangs: {self.said(index)}"
            time.sleep(0.05)

    def watchdog(self, index):
        """A worker's watchdog, once it runs."""
        for child in psutil.Process(self.processes[index].pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "tfopt-watchdog" in " ".join(child.cmdline()):
                    return child
        return None


@pytest.fixture
def trainings():
    with Trainings() as trainings:
        yield trainings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "lost", "code", "why"),
    [
        (signal.SIGKILL, 0, -signal.SIGKILL, "ended without a goodbye"),
        (signal.SIGSTOP, 1, -signal.SIGKILL, "has been stopped (SIGSTOP)"),
        *campaign([(signal.SIGTERM, 1, -signal.SIGTERM, "ended without a goodbye")]),
    ],
)
def test_a_lost_worker_ends_the_other_with_75_and_is_named(trainings, number, lost, code, why):
    addresses = trainings.start_both(STOPPED=2, KILL=2)
    trainings.processes[lost].send_signal(number)
    ended = trainings.wait()
    assert ended[lost].code == code, ended
    assert ended[1 - lost].code == 75, ended
    assert f"Expected worker {lost} ({addresses[lost]}) to train with this one" in ended[1 - lost].stderr
    assert why in ended[1 - lost].stderr


@pytest.mark.slow
def test_tensorflows_own_error_waits_until_it_is_known_who_was_lost(trainings):
    addresses = trainings.start_both(SILENT=60)
    watchdog = trainings.watchdog(1)
    watchdog.suspend()  # so that TensorFlow knows before the watchdogs
    try:
        trainings.processes[1].kill()
        trainings.until(lambda: "errors_impl." in trainings.said(0, "stderr"), 0)
    finally:
        watchdog.resume()
    survivor = trainings.wait()[0]
    assert survivor.code == 75, survivor
    assert f"Expected worker 1 ({addresses[1]})" in survivor.stderr.rpartition("errors_impl.")[2]


@pytest.mark.slow
def test_a_worker_that_never_starts_is_named(trainings):
    addresses = free_addresses(2)
    trainings.start_training(addresses, 0, TRAINING, "--start-seconds", "3")
    end = trainings.wait()[0]
    assert end.code == 75, end
    assert f"Expected all 2 workers within 3 s. Found no sign of worker 1 ({addresses[1]})." in end.stderr
    assert end.stdout == "waiting\n"


@pytest.mark.slow
def test_sigterm_reaches_the_script_which_ends_well(trainings):
    trainings.start_both("--handle-sigterm")
    for process in trainings.processes.values():
        process.terminate()
    for end in trainings.wait().values():
        assert end.code == 0, end
        assert end.stdout.splitlines()[-1] == "trained"
        assert end.stdout.count("terminating\n") == 1


class Launched:
    """The script, run by the launcher."""

    def __init__(self, *options):
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tfopt.distribute.launch", "-n", "2", TRAINING, *options]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self):
        """Waits for its end and returns its exit code and output."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


@pytest.mark.slow
class TestUnderTheLauncher:
    def test_two_jobs_at_once(self):
        jobs = [Launched("--steps", "30") for _ in range(2)]
        for code, out, err in [job.end() for job in jobs]:
            assert code == 0, err
            for rank in range(2):
                mine = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
                said = [line.removeprefix(f"[{rank}] ") for line in mine]
                assert said == ["waiting", "step 0", "step 10", "step 20", "trained"]

    def test_an_error_in_one_is_named_by_the_other(self):
        code, out, err = Launched("--fail-in", "1").end()
        assert code == 1, err
        assert "[1] ValueError: no such label" in err
        assert "[launch] worker 1 ended with exit code 1" in err
        told = next(line for line in err.splitlines() if line.startswith("[0] Expected worker 1 (127.0.0.1:"))
        assert "Found: it failed at epoch 1, step 6: ValueError: no such label. What to do: " in told
        assert "trained" not in out


def test_a_port_that_is_taken_is_refused_before_tensorflow_starts(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        own = f"127.0.0.1:{holder.getsockname()[1]}"
        config = {"cluster": {"worker": [own, "127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        pattern = rf"{own}, the address of worker 0, to be free\. Found: .*process {os.getpid()}\) listens there"
        with pytest.raises(ClusterError, match=pattern):
            distribute.strategy("auto", start_seconds=1)
