"""When a watchdog gives its training process up, at exact times. With real processes: test_process.py."""

import os
import socket
import subprocess
from types import SimpleNamespace

import pytest

from tfopt.distribute.watchdog import training_process
from tfopt.distribute.watchdog.channel import Channel
from tfopt.distribute.watchdog.training_process import SAME_STEPS, ExitStatus, Intervals, TrainingProcess


class World:
    """A training process in place of this one's parent; the test sets its state and the time."""

    def __init__(self, monkeypatch, ours, theirs):
        self.now, self.state, self.says = 0.0, "S", Channel(theirs)
        monkeypatch.setattr(training_process, "_state", lambda pid: self.state)
        monkeypatch.setattr(training_process, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.seen = TrainingProcess(Channel(ours), os.getppid(), Intervals())

    def at(self, seconds, **message):
        """What the watchdog sees at a time, after an optional message from the process."""
        self.now = seconds
        if message:
            self.says.send(**message)
        return self.seen.poll()


@pytest.fixture
def world(monkeypatch):
    ours, theirs = socket.socketpair()
    yield World(monkeypatch, ours, theirs)
    ours.close()
    theirs.close()


def test_deaf_after_45_seconds(world):
    assert world.at(10, beat=1) is None
    assert world.at(54.9) is None
    assert "has hung for 45 s" in world.at(55).reason


def test_stopped_for_20_seconds_without_a_break(world):
    world.state = "T"
    assert world.at(10, beat=1) is None
    assert world.at(29) is None
    world.state = "R"
    assert world.at(29.5, beat=1) is None
    world.state = "T"
    assert world.at(30) is None
    assert world.at(49) is None
    assert "stopped (SIGSTOP) for 20 s" in world.at(50).reason
    assert not world.seen.is_ending


def test_an_unreadable_state_counts_as_running(world):
    world.state = None
    assert world.at(10, beat=1) is None
    assert world.at(44) is None  # by then a stopped one would be given up


def test_stuck_in_python(world):
    assert world.at(1, stuck="it has made no progress") == ExitStatus("it has made no progress")
    assert not world.seen.is_ending


def test_a_failure_that_would_recur(world):
    assert world.at(1, failed="it failed", remedy="correct it") == ExitStatus("it failed", remedy="correct it")


def test_ends(world):
    left = ExitStatus("it had ended before", ended_well=True, remedy=SAME_STEPS)
    assert world.at(1, bye="it had ended before") == left
    assert world.seen.is_ending
    assert not world.seen.gone
    world.says.close()
    assert world.at(2) == left
    assert world.seen.gone


@pytest.mark.parametrize(("on_purpose", "grace"), [(True, 30.0), (False, 0.0)])
def test_fails(world, on_purpose, grace):
    assert world.at(1, failed="it failed", on_purpose=on_purpose) == ExitStatus("it failed", grace)
    world.at(2, bye="well")
    assert world.at(2) == ExitStatus("it failed", grace)


def test_gone_without_a_word(world):
    world.says.close()
    assert "ended without a goodbye" in world.at(1).reason


def test_gone_though_a_child_of_its_own_holds_the_channel(world):
    assert world.at(0.5) is None
    world.seen._pid = 0  # the parent is gone
    assert "ended without a goodbye" in world.at(1).reason


def test_the_state_of_a_process_with_a_nasty_name(tmp_path):
    (tmp_path / "a) R (").symlink_to("/bin/sleep")
    stopped = subprocess.Popen([tmp_path / "a) R (", "60"])
    try:
        stopped.send_signal(19)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        assert training_process._state(stopped.pid) == "T"
    finally:
        stopped.kill()
        stopped.wait()
    assert training_process._state(stopped.pid) is None
