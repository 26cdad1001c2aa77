"""The small process beside each training process: it names the worker that was lost, and ends those that wait for it.

`tfopt.distribute.watch` starts it, with a socket as its standard input. The watchdogs form a star around the chief's:
each looks after its own training process and tells the chief's of its end, and that one tells all. It is a process of
its own since nothing inside a training process runs while C code holds Python's lock, or when it is stopped or killed.
"""

import contextlib
import math
import os
import signal
import socket
import time
from typing import Any

from tfopt.distribute.barrier import Gathering, MissingPeerError, Start, join
from tfopt.distribute.channel import Channel, readable
from tfopt.distribute.intervals import Intervals
from tfopt.distribute.watched import Fate, Watched
from tfopt.errors import ClusterError

_CHIEF = 0
_LEFT = Fate("it had ended before, by itself")
_BROKE_OFF = Fate("the connection to its watchdog broke off (killed, or its machine is down)")
_SETUP_BYTES = 1 << 24  # the list of workers may be long


class Watchdog:
    """One watchdog after the start.

    Args:
        start: Who is in the job.
        training: The own training process.
        links: The channels to the other watchdogs by index: to all for the chief's, to the chief's for the others.
        intervals: When to act.
    """

    def __init__(self, start: Start, training: Watched, links: dict[int, Channel], intervals: Intervals):
        self._start = start
        self._training = training
        self._links = links
        self._intervals = intervals
        self._beat_at = 0.0
        self._fate: Fate | None = None  # of the own training process, once it is known and passed on
        self._left: set[int] = set()  # workers that ended well
        self._asking: set[int] = set()  # workers whose communication broke, and who ask through whom
        self._lost = False  # a worker is lost, so the job ends; what comes after is the consequence
        self._over = False  # the chief has ended well: nobody waits for anybody any more
        self._sentence = ""  # what the own training process is told before it ends
        self._sentence_at = self._kill_at = self._ended_at = math.inf
        for link in links.values():
            link.heard_at = time.monotonic()  # nothing was to be said while all waited for the last one

    def run(self) -> None:
        """Watches until the own training process ends and the others know."""
        while not self._done():
            readable([*self._links.values(), self._training.channel], self._intervals.beat_seconds / 4)
            for index, link in list(self._links.items()):
                self._hear(index, link)
            self._look_after_training()
            self._answer()
            self._carry_out()
            self._beat()

    def _hear(self, index: int, link: Channel) -> None:
        """Reads first and judges then: after a pause of this very process there are messages to be read."""
        for message in link.receive():
            if "lost" in message:
                self._condemn(message["lost"], Fate(message["why"], message["after_seconds"]))
            elif "over" in message:
                self._over = True
                self._training.channel.send(over=_sentence(self._start, _CHIEF, _LEFT))
            elif "fate" in message:
                self._spread(index, Fate(message["fate"], message["after_seconds"]))
                link.close()  # by which the other knows that it was heard
            elif "asks" in message:
                self._asking.add(index)
        silent = time.monotonic() - link.heard_at
        if silent > self._intervals.silent_seconds:
            self._lose(index, Fate(f"its watchdog has been silent for {silent:.0f} s (machine or network down?)"))
        elif link.closed:
            self._lose(index, _BROKE_OFF)

    def _lose(self, index: int, fate: Fate) -> None:
        """Takes note that a link is gone, which is a loss only if nothing was said before."""
        self._links.pop(index).close()
        if self._over or index in self._left:
            return
        if self._start.index == _CHIEF:
            self._spread(index, fate)
        else:
            self._condemn(index, fate)

    def _spread(self, index: int, fate: Fate) -> None:
        """Tells all others of a worker's end. Only the chief's watchdog does."""
        if not fate.why:
            self._left.add(index)
            if index == _CHIEF:
                self._over = True
                self._tell_all_but(index, over=True)
        elif not self._lost:
            self._lost = True
            self._tell_all_but(index, lost=index, why=fate.why, after_seconds=fate.after_seconds)
            if index != _CHIEF:
                self._condemn(index, fate)

    def _tell_all_but(self, index: int, **message: Any) -> None:
        for other, link in self._links.items():
            if other != index:
                link.send(**message)

    def _look_after_training(self) -> None:
        fate = self._training.look()
        if fate is None or self._fate is not None:
            return
        self._fate = fate
        if self._start.index == _CHIEF:
            self._spread(_CHIEF, fate)
        elif _CHIEF in self._links:
            self._links[_CHIEF].send(fate=fate.why, after_seconds=fate.after_seconds)
        if not self._training.ends:  # stopped or hung: it keeps its GPU, and would never end
            self._condemn(self._start.index, fate)

    def _answer(self) -> None:
        """A worker whose communication broke waits to hear through whom: a lost one, or else one that has left."""
        # It need not end at its leisure any more. Once told, it is not told again: each time would put the kill off.
        told = self._kill_at < math.inf
        if self._training.asks and self._sentence and not told:
            self._sentence_at = min(self._sentence_at, time.monotonic())
        elif self._training.asks and self._start.index not in self._asking:
            self._asking.add(self._start.index)
            self._tell_all_but(self._start.index, asks=True)
        if self._start.index != _CHIEF or not self._left:
            return
        index = min(self._left)
        for asking in self._asking & self._links.keys():
            self._links[asking].send(lost=index, why=_LEFT.why, after_seconds=0)
        if _CHIEF in self._asking:
            self._condemn(index, _LEFT)
        self._asking.clear()

    def _condemn(self, index: int, fate: Fate) -> None:
        """The own training process is to end, since a worker is lost, perhaps itself."""
        if not self._sentence and not self._training.ends:
            self._sentence = _sentence(self._start, index, fate)
            self._sentence_at = time.monotonic() + fate.after_seconds

    def _carry_out(self) -> None:
        now = time.monotonic()
        if now >= self._sentence_at:
            self._training.channel.send(lost=self._sentence)
            self._sentence_at, self._kill_at = math.inf, now + self._intervals.kill_seconds
        if now >= self._kill_at and not self._training.ends:
            with contextlib.suppress(OSError):  # there may be no stderr
                os.write(2, f"\n{self._sentence} It did not end by itself and is killed.\n".encode())
            self._training.kill()
            self._kill_at = math.inf

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._intervals.beat_seconds:
            self._beat_at = now
            for channel in (*self._links.values(), self._training.channel):
                channel.send(beat=1)

    def _done(self) -> bool:
        """Whether the training process is gone, or has said so, and the others have heard of it or had the time to."""
        if not self._training.ends:
            return self._over
        now = time.monotonic()
        self._ended_at = min(self._ended_at, now)
        return not self._links or now - self._ended_at > self._intervals.linger_seconds


def _sentence(start: Start, index: int, fate: Fate) -> str:
    own, why = start.name(start.index), fate.why.rstrip(" .:")  # the end of an error's own text
    if index == start.index:
        return (
            f"Expected this worker, {own}, to go on. Found: {why}. The other workers were told and end. "
            "What to do: find out what held it up, then start all workers again."
        )
    return (
        f"Expected {start.name(index)} to train with this one, {own}, to the end. Found: {why}. What to do: look "
        f"into the output of worker {index} first, then start all workers again."
    )


def main() -> None:
    """Runs in the small process. Its standard input is a socket to the training process."""
    # Meant for the training process, which this one is to outlive by a moment; Slurm sends them to every process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    channel = Channel(socket.socket(fileno=0), line_bytes=_SETUP_BYTES)
    setup = _setup(channel)
    start = Start(tuple(setup["workers"]), setup["index"], setup["pid"], setup["deadline_seconds"])
    try:
        if start.index == _CHIEF:
            links, seed = Gathering(start, channel).run()
        else:
            chief, seed = join(start, channel)
            links = {_CHIEF: chief}
    except ClusterError as error:
        channel.send(error=str(error), missing=isinstance(error, MissingPeerError))
        return
    channel.send(go=seed)
    intervals = Intervals(**setup["intervals"])
    Watchdog(start, Watched(channel, start.pid, intervals), links, intervals).run()


def _setup(channel: Channel) -> dict[str, Any]:
    """The first message of the training process: what Start and Intervals need."""
    while not channel.closed:
        readable([channel], 1.0)
        for message in channel.receive():
            return message
    raise SystemExit(0)
