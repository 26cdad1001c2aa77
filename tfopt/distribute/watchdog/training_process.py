"""Judges a training process from its watchdog: how it ended, or that it is stopped or hung."""

import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from tfopt.distribute.watchdog.channel import Channel
from tfopt.errors import ClusterError

# What to do about workers that diverged.
SAME_STEPS = (
    "give all workers the same model, epochs and steps, and call fit, evaluate and predict in all of them; a restart "
    "would end in the same way"
)


@dataclass(frozen=True, slots=True)
class Intervals:
    """How long a watchdog waits before it acts.

    Survivors end within 90 s, since deaf, leave and kill add up to less.
    """

    beat_seconds: float = 2.0
    """Time between heartbeats."""
    silent_seconds: float = 20.0
    """Time without a message after which another watchdog counts as lost."""
    stopped_seconds: float = 20.0
    """How long a training process may be stopped (SIGSTOP, Ctrl-Z)."""
    deaf_seconds: float = 45.0
    """Time without a heartbeat after which a training process counts as hung."""
    leave_seconds: float = 30.0
    """Time for the others to end by themselves, perhaps with a checkpoint, after a worker ended on purpose with an exit
    code or by Ctrl-C."""
    kill_seconds: float = 5.0
    """Time for a training process to end before it is killed."""
    linger_seconds: float = 2.0
    """Most time a watchdog outlives its training process, to tell the others."""
    progress_seconds: float | None = None
    """Time without progress (see `progress.count_progress`) after which a worker is ended; None: any time."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Reads TFOPT_WATCH_DEAF_SECONDS and the like; raises ClusterError if one is not a positive number."""
        names = {field.name: f"TFOPT_WATCH_{field.name.upper()}" for field in fields(cls)}
        return cls(**{name: _seconds(key, environ[key]) for name, key in names.items() if key in environ})


def _seconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ClusterError(
            f"Expected {key} to be a positive number of seconds. Found: {text!r}. What to do: correct or unset it."
        )
    return value


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a training process ended, or why it will not make progress again."""

    reason: str
    """Its description in messages."""
    grace_seconds: float = 0.0
    """Time for the others to end by themselves."""
    ended_well: bool = False
    """Whether the others may go on, unless they wait for it."""
    remedy: str = ""
    """What to do, if a restart would end in the same way; the others then end with 1. Otherwise they are restarted."""


class TrainingProcess:
    """The training process, the parent of this one; its channel closes when it ends."""

    def __init__(self, channel: Channel, pid: int, intervals: Intervals):
        self.channel = channel
        self.gone = False
        self.asks_who_is_lost = False  # its communication broke
        self._pid = pid
        self._intervals = intervals
        self._reported: ExitStatus | None = None
        self._stuck: ExitStatus | None = None
        self._stopped_since: float | None = None
        self._heard_at = time.monotonic()  # not the channel's: messages before the start do not count

    def poll(self) -> ExitStatus | None:
        """Returns its exit status once there is one. Call it every second or so."""
        for message in self.channel.receive():
            self._receive(message)
        # A child forked outside Python may hold the channel open, so the parent itself is checked too.
        self.gone = self.channel.closed or os.getppid() != self._pid
        if self._reported is not None:
            return self._reported
        if self.gone:
            return ExitStatus("its process ended without a goodbye (killed, or out of memory)")
        return self._stopped() or self._hung() or self._stuck

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or has reported that it will."""
        return self.gone or self._reported is not None

    def kill(self) -> None:
        """Kills it, unless it is gone."""
        if os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def _receive(self, message: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        if "failed" in message:
            grace_seconds = self._intervals.leave_seconds if message.get("on_purpose") else 0.0
            self._reported = ExitStatus(message["failed"], grace_seconds, remedy=message.get("remedy", ""))
        elif "bye" in message and self._reported is None:
            self._reported = ExitStatus(message["bye"], ended_well=True, remedy=SAME_STEPS)
        elif "stuck" in message:
            self._stuck = ExitStatus(message["stuck"])
        elif "asks" in message:
            self.asks_who_is_lost = True

    def _stopped(self) -> ExitStatus | None:
        now = time.monotonic()
        if _state(self._pid) != "T":
            self._stopped_since = None
            return None
        if self._stopped_since is None:
            self._stopped_since = now
        if now - self._stopped_since < self._intervals.stopped_seconds:
            return None
        return ExitStatus(f"its process has been stopped (SIGSTOP) for {now - self._stopped_since:.0f} s")

    def _hung(self) -> ExitStatus | None:
        silent = time.monotonic() - self._heard_at
        if silent < self._intervals.deaf_seconds:
            return None
        return ExitStatus(
            f"its process has hung for {silent:.0f} s: none of its Python threads runs (C code that holds the GIL?)"
        )


def _state(pid: int) -> str | None:
    """A process's state in /proc, such as "R" for running; None if it cannot be read."""
    try:
        # The name, in brackets, may itself contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1].decode()
    except OSError:
        return None
