"""The training process's side of the watchdog. Faults: test_process.py."""

import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfopt.distribute.watchdog import watch
from tfopt.distribute.watchdog.channel import Channel
from tfopt.distribute.watchdog.training_process import Intervals
from tfopt.distribute.watchdog.watch import Watch
from tfopt.errors import ClusterError

ROOT = Path(__file__).parents[3]


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_folder_full_of_traps_does_not_mislead_the_watchdog(tmp_path):
    for name in ("socket", "json", "select", "tfopt", "difflib"):
        (tmp_path / f"{name}.py").write_text("raise SystemError('the wrong module')")
    code = f"""
import sys, types, socket, os
sys.path.insert(0, {str(ROOT)!r})
from tfopt.distribute.watchdog.watch import Watch
os.chdir({str(tmp_path)!r})
os.environ["PYTHONPATH"] = {str(tmp_path)!r}
try:
    Watch.start(types.SimpleNamespace(workers=("127.0.0.1:9", "127.0.0.1:10"), index=1), deadline_seconds=0.5)
except Exception as error:
    print(error)
"""
    assert "Expected worker 0 (127.0.0.1:9), the chief, to answer within 0.5 s." in run(code).stdout


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_an_invalid_deadline(seconds):
    with pytest.raises(ValueError, match=r"Expected deadline_seconds to be (above 0|a finite number)\. Received: "):
        Watch.start(SimpleNamespace(workers=("a:1", "b:1"), index=0), deadline_seconds=seconds)


def test_a_loss_reported_with_the_go_ahead_is_noticed(monkeypatch):
    ours, theirs = map(Channel, socket.socketpair())
    theirs.send(go=7)
    theirs.send(lost="worker 1", recurs=True)
    assert watch._await_go(ours, time.monotonic() + 30) == 7

    def end(text, code):
        raise InterruptedError(text, code)

    monkeypatch.setattr(watch, "_exit", end)
    with pytest.raises(InterruptedError, match=r"worker 1\] 1"):
        Watch(ours, None, 7, Intervals(beat_seconds=600))._run()
    theirs.close()
    ours.close()


class TestIntervals:
    def test_from_the_environment(self):
        intervals = Intervals.from_environ({"TFOPT_WATCH_DEAF_SECONDS": "600", "TFOPT_WATCH_OTHER": "x"})
        assert intervals == Intervals(deaf_seconds=600)
        assert json.loads(json.dumps(asdict(intervals)))["deaf_seconds"] == 600

    @pytest.mark.parametrize("value", ["", "no", "0", "-1", "nan", "inf"])
    def test_wrong(self, value):
        with pytest.raises(ClusterError, match="Expected TFOPT_WATCH_BEAT_SECONDS to be a positive number of seconds"):
            Intervals.from_environ({"TFOPT_WATCH_BEAT_SECONDS": value})

    def test_survivors_end_within_90_seconds(self):
        usual = Intervals()
        longest = max(usual.silent_seconds, usual.stopped_seconds, usual.deaf_seconds)
        assert longest + usual.leave_seconds + usual.kill_seconds + 4 * usual.beat_seconds < 90


TAKE_SIGTERM = """
import ctypes, os, signal, time
from tfopt.distribute.watchdog.watch import restore_sigterm
{before}
ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # as a C runtime does; here it ignores the signal
{restore}
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
print("alive")
"""


@pytest.mark.parametrize(
    ("before", "restore", "code"),
    [
        ("", "", 0),
        ("", "restore_sigterm()", -15),
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(9))", "restore_sigterm()", 9),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "restore_sigterm()", 0),
    ],
)
def test_sigterm_reaches_python(before, restore, code):
    command = [sys.executable, "-c", TAKE_SIGTERM.format(before=before, restore=restore)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == code
