"""A training process, as its watchdog sees it: alive, stopped, hung, failed, ended or gone."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt.distribute.channel import Channel
from tfopt.distribute.intervals import Intervals


@dataclass(frozen=True, slots=True)
class Fate:
    """How a worker ended, or that it will not go on.

    Attributes:
        why: What messages say of it. Empty: it ended well, and the others may go on.
        after_seconds: What the others get to end by themselves.
    """

    why: str = ""
    after_seconds: float = 0.0


class Watched:
    """The training process.

    Args:
        channel: The channel to it. It closes when the process is gone.
        pid: Its process id. It is the parent of this one.
        intervals: When it counts as stopped or hung.

    Attributes:
        gone: Whether the process has ended.
        asks: Whether its communication broke, and it asks through whom.
    """

    def __init__(self, channel: Channel, pid: int, intervals: Intervals):
        self.channel = channel
        self.gone = False
        self.asks = False
        self._pid = pid
        self._intervals = intervals
        self._said: Fate | None = None
        self._stopped_since: float | None = None
        self._heard_at = time.monotonic()  # not the channel's: what the process said before the start does not count

    def look(self) -> Fate | None:
        """Returns its fate, as soon as there is one. Call it every second or so."""
        for message in self.channel.receive():
            self._hear(message)
        # A child that the process has forked without Python may hold the channel open; a parent that has gone is gone.
        self.gone = self.channel.closed or os.getppid() != self._pid
        if self._said is not None:
            return self._said
        if self.gone:
            return Fate("its process has ended without a goodbye (killed, or out of memory)")
        return self._stopped() or self._deaf()

    @property
    def ends(self) -> bool:
        """Whether it has ended, or said that it is about to."""
        return self.gone or self._said is not None

    def kill(self) -> None:
        """Kills it, unless it is gone."""
        if os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def _hear(self, message: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        if "failed" in message:
            self._said = Fate(message["failed"], self._grace(message))
        elif "bye" in message and self._said is None:
            self._said = Fate()
        elif "asks" in message:
            self.asks = True

    def _grace(self, message: dict[str, Any]) -> float:
        return self._intervals.leave_seconds if message.get("on_purpose") else 0.0

    def _stopped(self) -> Fate | None:
        now = time.monotonic()
        if _state(self._pid) != "T":
            self._stopped_since = None
            return None
        if self._stopped_since is None:
            self._stopped_since = now
        if now - self._stopped_since < self._intervals.stopped_seconds:
            return None
        return Fate(f"its process has been stopped (SIGSTOP) for {now - self._stopped_since:.0f} s")

    def _deaf(self) -> Fate | None:
        silent = time.monotonic() - self._heard_at
        if silent < self._intervals.deaf_seconds:
            return None
        return Fate(
            f"its process has hung for {silent:.0f} s: no Python thread of it runs (C code that holds the GIL?)"
        )


def _state(pid: int) -> str | None:
    """The state of a process as /proc has it, "R" for running. None where that cannot be read."""
    try:
        # The name, in brackets, may hold spaces and brackets itself.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1].decode()
    except OSError:
        return None
