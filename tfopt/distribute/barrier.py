"""The start: nobody goes on before all workers are there, and who is missing is named in time.

The chief's watchdog listens on the chief's own address, which TensorFlow has not taken yet; the others connect to it.
The connections outlive the start, and the listening socket does not: TensorFlow binds the same port after it.
"""

import hashlib
import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfopt.distribute.channel import Channel, readable
from tfopt.distribute.listening import listen_everywhere
from tfopt.errors import ClusterError
from tfopt.text import listed

MAGIC = "tfopt-watchdog-1"

_HELLO_SECONDS = 5.0  # that a newcomer may take to say who it is
_RETRY_SECONDS = 0.25
_CONNECT_SECONDS = 2.0  # not longer: in between the watchdog looks whether its training process is still there
_EXTRA_SECONDS = 5.0  # that the others wait longer than the chief, who knows better who is missing


class MissingPeerError(ClusterError):
    """A worker has not come in time. If all are started again, it may; a wrong configuration would stay wrong."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a watchdog needs for the start.

    Attributes:
        workers: The addresses of all workers, in the order of their ranks.
        index: The rank of this one.
        pid: Its training process.
        deadline_seconds: How long to wait for the others.
    """

    workers: tuple[str, ...]
    index: int
    pid: int
    deadline_seconds: float

    def name(self, index: int) -> str:
        """How messages call a worker."""
        return f"worker {index} ({self.workers[index]})"

    def hello(self) -> dict[str, Any]:
        """What a worker says to the chief first."""
        host = socket.gethostname()
        return {"magic": MAGIC, "job": fingerprint(self.workers), "index": self.index, "pid": self.pid, "host": host}


def fingerprint(workers: Sequence[str]) -> str:
    """Returns a text that two jobs share only if their workers do."""
    return hashlib.sha256("\n".join(workers).encode()).hexdigest()[:16]


class Gathering:
    """The chief's side: waits for all others and gives them a common random seed.

    Args:
        start: What to wait for.
        training: The channel to the own training process: when it closes, nobody waits any more.
    """

    def __init__(self, start: Start, training: Channel):
        self._start = start
        self._training = training
        self._newcomers: dict[Channel, float] = {}
        self._there: dict[int, Channel] = {}
        self._hellos: dict[int, dict[str, Any]] = {}

    def run(self) -> tuple[dict[int, Channel], int]:
        """Returns the channels to the others by index, and the seed.

        Raises:
            MissingPeerError: A worker has not come before the deadline; those there are told too.
            ClusterError: The port is taken.
        """
        due = time.monotonic() + self._start.deadline_seconds
        with _listener(self._start) as listener:
            while len(self._there) < len(self._start.workers) - 1:
                now = time.monotonic()
                if now >= due:
                    raise self._missing()
                self._step(listener, min(due - now, 1.0))
        for newcomer in self._newcomers:
            newcomer.close()
        seed = random.SystemRandom().getrandbits(31)
        for channel in self._there.values():
            channel.send(go=seed)
        return self._there, seed

    def _step(self, listener: socket.socket, wait_seconds: float) -> None:
        sources: list[socket.socket | Channel] = [listener, self._training, *self._newcomers, *self._there.values()]
        for source in readable(sources, wait_seconds):
            if source is listener:
                self._accept(listener)
            elif source is self._training:
                stop_if_gone(self._training)
            elif isinstance(source, Channel):
                self._hear(source)
        now = time.monotonic()
        for newcomer in [each for each, since in self._newcomers.items() if now - since > _HELLO_SECONDS]:
            self._drop(newcomer)
        self._there = {index: channel for index, channel in self._there.items() if not channel.closed}

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left until the silent ones are dropped
            return
        self._newcomers[Channel(connection)] = time.monotonic()

    def _hear(self, channel: Channel) -> None:
        for hello in channel.receive():
            if channel in self._newcomers:  # the first message counts; whoever is there has nothing more to say
                self._greet(channel, hello)
        if channel.closed:
            self._drop(channel)

    def _greet(self, channel: Channel, hello: dict[str, Any]) -> None:
        refusal = self._refusal(hello)
        if refusal:
            channel.send(refused=refusal)
            self._drop(channel)
        else:
            del self._newcomers[channel]
            self._there[hello["index"]], self._hellos[hello["index"]] = channel, hello
            channel.send(welcome=True)

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        """Why a newcomer is turned away, if it is."""
        index, workers = hello.get("index"), self._start.workers
        if hello.get("magic") != MAGIC:
            return (
                f"it speaks {str(hello.get('magic'))[:40]!r}, and here {MAGIC!r} is spoken (another version of tfopt?)"
            )
        if hello.get("job") != fingerprint(workers):
            return f"this port belongs to another job, of {len(workers)} workers: {listed(workers, 4)}"
        if type(index) is not int or not 0 < index < len(workers):
            return f"there is no other worker {index!r} in this job of {len(workers)}"
        if index in self._there:
            first = self._hellos[index]
            return f"there is a worker {index} already: process {first.get('pid')} on host {first.get('host')!r}"
        return None

    def _drop(self, channel: Channel) -> None:
        self._newcomers.pop(channel, None)
        channel.close()

    def _missing(self) -> MissingPeerError:
        start = self._start
        missing = [start.name(i) for i in range(1, len(start.workers)) if i not in self._there]
        text = (
            f"Expected all {len(start.workers)} workers within {start.deadline_seconds:g} s. "
            f"Found no sign of {listed(missing, 8)}. What to do: look whether it was started, with the same list of "
            f"workers, and whether it reaches {start.workers[0]}; a firewall or a wrong address keeps it away."
        )
        for channel in self._there.values():
            channel.send(error=text)
        return MissingPeerError(text)


def join(start: Start, training: Channel) -> tuple[Channel, int]:
    """The others' side: finds the chief and waits for its word.

    Returns:
        The channel to the chief, and the seed.

    Raises:
        MissingPeerError: The chief is not there in time, says no more, or names one that is missing.
        ClusterError: The chief turns this worker away, or something else has its address.
    """
    due, last, stranger = time.monotonic() + start.deadline_seconds, "nobody answers there", False
    while time.monotonic() < due:
        try:
            chief = Channel(_connect(start.workers[0]))
        except OSError as error:
            last, stranger = error.strerror or str(error), False
        else:
            chief.send(**start.hello())
            word = _word(chief, start, training)
            if isinstance(word, int):
                return chief, word
            last, stranger = word, bool(chief.nonsense)
            chief.close()
        if training in readable([training], _RETRY_SECONDS):
            stop_if_gone(training)
    raise (ClusterError if stranger else MissingPeerError)(
        f"Expected {start.name(0)}, the chief, to answer within {start.deadline_seconds:g} s. Found: {last}. "
        f"What to do: look whether it was started, and whether this machine reaches {start.workers[0]}."
    )


def _word(chief: Channel, start: Start, training: Channel) -> int | str:
    """The seed that the chief sends when all are there; or why there is none."""
    silence = "something listens there and says nothing"
    due = time.monotonic() + _HELLO_SECONDS
    while time.monotonic() < due:
        for source in readable([chief, training], 1.0):
            if source is training:
                stop_if_gone(training)
        for message in chief.receive():
            if "welcome" in message:  # it is the chief, who gives up in its own time
                due = time.monotonic() + start.deadline_seconds + _EXTRA_SECONDS
                silence = "it took this worker in and has said nothing since (stopped, or cut off from the network?)"
            elif "refused" in message:
                raise _turned_away(start, message["refused"])
            elif "error" in message:
                raise MissingPeerError(message["error"])
            elif "go" in message:
                return int(message["go"])
        if chief.nonsense:
            return f"something else listens there and answers {chief.nonsense[:24]!r} (TensorFlow, of another job?)"
        if chief.closed:
            return "it answers and breaks off"
    return silence


def _turned_away(start: Start, why: str) -> ClusterError:
    return ClusterError(
        f"Expected {start.name(0)}, the chief, to take this process as {start.name(start.index)}. Found: it says "
        f"that {why}. What to do: give each job ports of its own, and each worker an index of its own."
    )


def _listener(start: Start) -> socket.socket:
    _, port = _split(start.workers[0])
    try:
        return listen_everywhere(port, backlog=max(128, len(start.workers)))
    except OSError as error:
        raise ClusterError(
            f"Expected port {port} to be free for {start.name(0)}, the chief. Found: {os.strerror(error.errno or 0)}. "
            "What to do: end the job that holds it, or give this one another port."
        ) from error


def _connect(address: str) -> socket.socket:
    host, port = _split(address)
    connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    # The port that this end got may be one that a worker here is to bind.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if connection.getsockname() == connection.getpeername():  # Linux may connect a socket to itself on a free port
        connection.close()
        raise ConnectionRefusedError("nobody listens there")
    return connection


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def stop_if_gone(training: Channel) -> None:
    """Ends this watchdog if its training process no longer waits."""
    training.receive()
    if training.closed:
        raise SystemExit(0)
