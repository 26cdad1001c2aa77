"""The watchdog process: reports how its training process ended, and ends it when another worker is lost.

`watchdog.watch` starts it with a socket as its standard input. The watchdogs form a star: each reports the end of its
training process to the chief's, which tells all others. It is a separate process because no thread of a training
process runs while C code holds the GIL, or when the process is stopped or killed.
"""

import contextlib
import math
import os
import signal
import socket
import time
from dataclasses import asdict
from typing import Any

from tfopt.distribute.watchdog.barrier import MissingPeerError, Rendezvous, Start, join
from tfopt.distribute.watchdog.channel import Channel, readable
from tfopt.distribute.watchdog.training_process import ExitStatus, Intervals, TrainingProcess
from tfopt.errors import ClusterError

_CHIEF = 0
_SETUP_BYTES = 1 << 24  # for a long list of workers


_BROKE_OFF = ExitStatus("the connection to its watchdog broke off (killed, or its machine is down)")


class Watchdog:
    """One watchdog, once all workers have joined.

    Its `links` to other watchdogs are by rank: the chief's has one to each, the others have one to the chief's.
    """

    def __init__(self, start: Start, training: TrainingProcess, links: dict[int, Channel], intervals: Intervals):
        self._start = start
        self._training = training
        self._links = links
        self._intervals = intervals
        self._beat_at = 0.0
        self._status: ExitStatus | None = None  # of its training process, once known and reported
        self._left: dict[int, ExitStatus] = {}  # workers that ended well
        self._asking: set[int] = set()  # workers whose communication broke and that ask which worker is lost
        self._lost = False  # a worker is lost and the job ends; later losses are consequences
        self._over = False  # the chief ended well, so nobody waits for anybody any more
        self._message = ""  # for its training process, before it is ended
        self._recurs = False  # what ends it would end a restart, too
        self._shutdown_at = self._kill_at = self._ended_at = math.inf
        for link in links.values():
            link.heard_at = time.monotonic()  # links are silent until the last worker has joined

    def run(self) -> None:
        """Watches until its training process has ended and the others know."""
        while not self._done():
            readable([*self._links.values(), self._training.channel], self._intervals.beat_seconds / 4)
            for index, link in list(self._links.items()):
                self._receive(index, link)
            self._poll_training()
            self._answer()
            self._shut_down()
            self._beat()

    def _receive(self, index: int, link: Channel) -> None:
        """Reads before it judges: if this process was paused, messages are waiting."""
        for message in link.receive():
            if "lost" in message:
                self._schedule_shutdown(message["lost"], ExitStatus(**message["status"]))
            elif "over" in message:
                self._over = True
                status = ExitStatus(**message["over"])
                self._training.channel.send(over=_shutdown_message(self._start, _CHIEF, status))
            elif "ended" in message:
                self._broadcast(index, ExitStatus(**message["ended"]))
                link.close()  # acknowledges the message
            elif "asks" in message:
                self._asking.add(index)
        silent = time.monotonic() - link.heard_at
        if silent > self._intervals.silent_seconds:
            self._lose(index, ExitStatus(f"its watchdog has been silent for {silent:.0f} s (machine or network down?)"))
        elif link.closed:
            self._lose(index, _BROKE_OFF)

    def _lose(self, index: int, status: ExitStatus) -> None:
        """Removes a link; unless its worker had reported its end, that worker is lost."""
        self._links.pop(index).close()
        if self._over or index in self._left:
            return
        if self._start.index == _CHIEF:
            self._broadcast(index, status)
        else:
            self._schedule_shutdown(index, status)

    def _broadcast(self, index: int, status: ExitStatus) -> None:
        """Tells all others how a worker ended. Only the chief's watchdog does this."""
        if status.ended_well:
            self._left[index] = status
            if index == _CHIEF:
                self._over = True
                self._send_to_all_but(index, over=asdict(status))
        elif not self._lost:
            self._lost = True
            self._send_to_all_but(index, lost=index, status=asdict(status))
            if index != _CHIEF:
                self._schedule_shutdown(index, status)

    def _send_to_all_but(self, index: int, **message: Any) -> None:
        for other, link in self._links.items():
            if other != index:
                link.send(**message)

    def _poll_training(self) -> None:
        status = self._training.poll()
        if status is None or self._status is not None:
            return
        self._status = status
        if self._start.index == _CHIEF:
            self._broadcast(_CHIEF, status)
        elif _CHIEF in self._links:
            self._links[_CHIEF].send(ended=asdict(status))
        if not self._training.is_ending:  # stopped or hung: it would never release its GPU
            self._schedule_shutdown(self._start.index, status)

    def _answer(self) -> None:
        """Tells a worker whose communication broke which worker is lost or has left."""
        asks = self._training.asks_who_is_lost
        told = self._kill_at < math.inf  # telling it again would postpone the kill each time
        if asks and self._message and not told:
            self._shutdown_at = min(self._shutdown_at, time.monotonic())  # it no longer needs a grace period
        elif asks and self._start.index not in self._asking:
            self._asking.add(self._start.index)
            self._send_to_all_but(self._start.index, asks=True)
        if self._start.index != _CHIEF or not self._left:
            return
        index = min(self._left)
        for asking in self._asking & self._links.keys():
            self._links[asking].send(lost=index, status=asdict(self._left[index]))
        if _CHIEF in self._asking:
            self._schedule_shutdown(index, self._left[index])
        self._asking.clear()

    def _schedule_shutdown(self, index: int, status: ExitStatus) -> None:
        """Schedules the end of its training process, because a worker (perhaps this one) is lost."""
        if not self._message and not self._training.is_ending:
            self._message, self._recurs = _shutdown_message(self._start, index, status), bool(status.remedy)
            self._shutdown_at = time.monotonic() + status.grace_seconds

    def _shut_down(self) -> None:
        """Tells its training process to end once that is due, and kills it if it does not."""
        now = time.monotonic()
        if now >= self._shutdown_at:
            self._training.channel.send(lost=self._message, recurs=self._recurs)
            self._shutdown_at, self._kill_at = math.inf, now + self._intervals.kill_seconds
        if now >= self._kill_at and not self._training.is_ending:
            with contextlib.suppress(OSError):  # there may be no stderr
                os.write(2, f"\n{self._message} It did not end by itself and is killed.\n".encode())
            self._training.kill()
            self._kill_at = math.inf

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._intervals.beat_seconds:
            self._beat_at = now
            for channel in (*self._links.values(), self._training.channel):
                channel.send(beat=1)

    def _done(self) -> bool:
        """Whether its training process is ending and the others know, or have had time to be told."""
        if not self._training.is_ending:
            return self._over
        now = time.monotonic()
        self._ended_at = min(self._ended_at, now)
        return not self._links or now - self._ended_at > self._intervals.linger_seconds


def _shutdown_message(start: Start, index: int, status: ExitStatus) -> str:
    own, reason = start.name(start.index), status.reason.rstrip(" .:")  # an error's text may end in punctuation
    if index == start.index:
        return (
            f"Expected this worker, {own}, to keep running. Found: {reason}. The other workers were told and end. "
            "What to do: find out what held it up, then restart all workers."
        )
    remedy = status.remedy or f"look at the output of worker {index} first, then restart all workers"
    expected = f"Expected {start.name(index)} to train with this one, {own}, to the end."
    return f"{expected} Found: {reason}. What to do: {remedy}."


def main() -> None:
    """Runs the watchdog. Its standard input is a socket to the training process."""
    # Slurm signals every process. This one must outlive the training process, for which the signals are meant.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    channel = Channel(socket.socket(fileno=0), line_bytes=_SETUP_BYTES)
    setup = _await_setup(channel)
    start, intervals = Start(**setup["start"]), Intervals(**setup["intervals"])
    try:
        if start.index == _CHIEF:
            links, seed = Rendezvous(start, channel).run()
        else:
            chief, seed = join(start, channel)
            links = {_CHIEF: chief}
    except ClusterError as error:
        channel.send(error=str(error), missing=isinstance(error, MissingPeerError))
        return
    channel.send(go=seed)
    Watchdog(start, TrainingProcess(channel, start.pid, intervals), links, intervals).run()


def _await_setup(channel: Channel) -> dict[str, Any]:
    """Returns the training process's first message: the fields of Start and Intervals."""
    while not channel.closed:
        readable([channel], 1.0)
        for message in channel.receive():
            return message
    raise SystemExit(0)
