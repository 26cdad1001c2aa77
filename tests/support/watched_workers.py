"""Real training processes with real watchdogs, which run what a test gives them. They do not load TensorFlow."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE = 60  # seconds; only keeps a failing test from hanging

_WORKER = """
import ctypes, json, os, signal, sys, time, types
from tfopt.distribute.watchdog.watch import Watch
workers, index, deadline = json.loads(sys.argv[1])
watch = Watch.start(types.SimpleNamespace(workers=tuple(workers), index=index), deadline_seconds=deadline)
print("seed", watch.seed, flush=True)
exec(sys.argv[2])
"""
_QUICK = {"BEAT": 0.2, "STOPPED": 1, "LEAVE": 1, "KILL": 10}  # 10 s: processes end slowly on a busy machine


def free_addresses(count):
    """Unused addresses on this machine."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]


class Ended:
    """How a worker ended."""

    def __init__(self, code, stdout, stderr):
        self.code, self.stdout, self.stderr = code, stdout, stderr

    def __repr__(self):
        return f"exit code {self.code}\n{self.stdout}\n{self.stderr}"


class Workers:
    """Starts workers and cleans up. As a context manager, it fails if one leaves a process behind."""

    def __init__(self):
        self._mark = f"TFOPT_TEST_{uuid.uuid4().hex}"
        self._folder = tempfile.TemporaryDirectory()
        self.processes = {}

    def start(self, addresses, index, action="", *, deadline=30, **seconds):
        """Starts one, which runs `action` after the start. `seconds` change the intervals: DEAF=2."""
        command = ["-c", _WORKER, json.dumps([addresses, index, deadline]), action]
        return self._start(index, command, _QUICK | seconds, PYTHONUNBUFFERED="")

    def start_training(self, addresses, index, *command, **seconds):
        """Starts one that runs a script, which finds its place in TF_CONFIG."""
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        return self._start(index, command, seconds, TF_CONFIG=json.dumps(config))

    def _start(self, index, command, seconds, **environ):
        times = {f"TFOPT_WATCH_{name}_SECONDS": str(value) for name, value in seconds.items()}
        environ |= {self._mark: "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        # Files, unlike pipes, never fill up and block nobody.
        with self._file(index, "stdout").open("wb") as out, self._file(index, "stderr").open("wb") as err:
            self.processes[index] = subprocess.Popen(
                [sys.executable, *command], env=os.environ | times | environ, stdout=out, stderr=err
            )
        return self.processes[index]

    def said(self, index, name="stdout"):
        """A worker's output so far."""
        return self._file(index, name).read_text()

    def _file(self, index, name):
        return Path(self._folder.name, f"{index}.{name}")

    def run(self, *actions, absent=(), **options):
        """Starts one worker per action and returns how they ended."""
        addresses = free_addresses(len(actions))
        for index, action in enumerate(actions):
            if index not in absent:
                self.start(addresses, index, action, **options)
        return self.wait()

    def wait(self, seconds=DEADLINE):
        """Waits for all started since the last wait and returns how they ended, by index."""
        ended = {}
        for index, process in self.processes.items():
            process.wait(timeout=seconds)
            ended[index] = Ended(process.returncode, self.said(index), self.said(index, "stderr"))
        self.processes.clear()
        return ended

    def left(self):
        """The workers' descendants that are still running."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        due = time.monotonic() + DEADLINE
        while (left := self.left()) and time.monotonic() < due:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._folder.cleanup()
        assert not left, f"left behind: {left}"
