import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tfopt.pipelines.service import relay

SUPPORT = Path(__file__).parents[2] / "support"


class Servers:
    """Processes forked from one that has TensorFlow imported."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        environ = {**os.environ, "PYTHONPATH": str(SUPPORT.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, str(SUPPORT / "service_servers.py")]
        self._forks = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
        )

    def run(self, *arguments, script=None, environ=None):
        """Starts a command and returns its number and the file with what it prints."""
        output = self.folder / f"{len(list(self.folder.iterdir()))}.txt"
        output.touch()
        asked = {"output": str(output), "arguments": list(arguments), "script": script, "environ": environ or {}}
        self.started.append(self._ask(asked))
        return self.started[-1], output

    def serve(self, *arguments):
        """Starts servers; returns the process's number and their addresses, the dispatcher's first."""
        number, output = self.run(*arguments)
        limit = time.monotonic() + 60
        while not output.read_text().startswith("tf.data service at "):
            assert time.monotonic() < limit, output.read_text()
            time.sleep(0.02)
        return number, [line.split()[-1].removeprefix("grpc://") for line in output.read_text().splitlines()]

    def wait(self, number):
        """Waits until a process ends, kills it after a minute, and returns its exit code."""
        self.started.remove(number)
        return self._ask({"wait": number})

    def close(self):
        """Ends all that still runs."""
        for number in self.started:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._forks.communicate(timeout=60)

    def _ask(self, asked):
        self._forks.stdin.write(json.dumps(asked) + "\n")
        self._forks.stdin.flush()
        return int(self._forks.stdout.readline())


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    started = Servers(tmp_path_factory.mktemp("servers"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def service(servers):
    """A service of three workers that nobody stops, as `service=` takes it."""
    _, (dispatcher, *_) = servers.serve("--port", "0", "--workers", "3")
    return f"grpc://{dispatcher}"


@pytest.fixture
def soon(monkeypatch):
    """Servers that do not answer are given up after three seconds."""
    monkeypatch.setattr(relay, "DEADLINE_SECONDS", 3.0)
