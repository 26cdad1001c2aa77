"""The start barrier: no worker proceeds before all have joined; missing workers are named.

The chief's watchdog listens on the chief's address, and the others connect to it. The connections stay open; the
listening socket does not, because TensorFlow binds the same port afterwards.
"""

import hashlib
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfopt.distribute.cluster.membership import parse_address
from tfopt.distribute.watchdog.channel import Channel, readable
from tfopt.errors import ClusterError
from tfopt.text import listed

MAGIC = "tfopt-watchdog-1"

_HELLO_SECONDS = 5.0  # for a new connection to identify itself
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 2.0  # the chief listens only for `deadline_seconds` from its own start
_CONNECT_SECONDS = 2.0  # short: between attempts the watchdog checks that its training process is still there
_EXTRA_SECONDS = 5.0  # the others wait this much longer than the chief, which knows who is missing


class MissingPeerError(ClusterError):
    """A worker did not join in time. Unlike other cluster errors, restarting all workers may fix it."""


@dataclass(frozen=True, slots=True)
class Start:
    """A watchdog's settings."""

    workers: Sequence[str]
    """Addresses of all workers, in rank order."""
    index: int
    """This worker's rank."""
    pid: int
    """Process id of its training process."""
    deadline_seconds: float
    """How long to wait for the others."""

    def name(self, index: int) -> str:
        """Returns a worker's name in messages."""
        return f"worker {index} ({self.workers[index]})"


def fingerprint(workers: Sequence[str]) -> str:
    """Identifies a job by its workers."""
    return hashlib.sha256("\n".join(workers).encode()).hexdigest()[:16]


class Rendezvous:
    """The chief's side of the barrier: waits for all other workers and gives them a common random seed.

    Waiting ends when the channel to the chief's training process closes.
    """

    def __init__(self, start: Start, training: Channel):
        self._start = start
        self._training = training
        self._newcomers: dict[Channel, float] = {}  # channel → time of connection
        self._joined: dict[int, Channel] = {}
        self._hellos: dict[int, dict[str, Any]] = {}

    def run(self) -> tuple[dict[int, Channel], int]:
        """Returns the channels to the others by index, and the seed.

        Raises:
            MissingPeerError: If a worker did not join before the deadline; the workers that did are notified.
            ClusterError: If the port is taken.
        """
        due = time.monotonic() + self._start.deadline_seconds
        with _listener(self._start) as listener:
            while len(self._joined) < len(self._start.workers) - 1:
                now = time.monotonic()
                if now >= due:
                    raise self._missing()
                self._step(listener, min(due - now, 1.0))
        for newcomer in self._newcomers:
            newcomer.close()
        seed = random.SystemRandom().getrandbits(31)
        for channel in self._joined.values():
            channel.send(go=seed)
        return self._joined, seed

    def _step(self, listener: socket.socket, wait_seconds: float) -> None:
        sources: list[socket.socket | Channel] = [listener, self._training, *self._newcomers, *self._joined.values()]
        for source in readable(sources, wait_seconds):
            if source is listener:
                self._accept(listener)
            elif source is self._training:
                stop_if_gone(self._training)
            elif isinstance(source, Channel):
                self._receive(source)
        now = time.monotonic()
        for newcomer in [each for each, since in self._newcomers.items() if now - since > _HELLO_SECONDS]:
            self._drop(newcomer)
        self._joined = {index: channel for index, channel in self._joined.items() if not channel.closed}

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it hung up, or descriptors have run out until silent newcomers are dropped
            return
        self._newcomers[Channel(connection)] = time.monotonic()

    def _receive(self, channel: Channel) -> None:
        for hello in channel.receive():
            if channel in self._newcomers:  # only the first message counts
                self._admit(channel, hello)
        if channel.closed:
            self._drop(channel)

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> None:
        rejection = self._rejection(hello)
        if rejection:
            channel.send(rejected=rejection)
            self._drop(channel)
        else:
            del self._newcomers[channel]
            self._joined[hello["index"]], self._hellos[hello["index"]] = channel, hello
            channel.send(welcome=True)

    def _rejection(self, hello: dict[str, Any]) -> str | None:
        """Why a newcomer is rejected; None if it is admitted."""
        index, workers = hello.get("index"), self._start.workers
        if hello.get("magic") != MAGIC:
            return f"it speaks {str(hello.get('magic'))[:40]!r}, not {MAGIC!r} (another version of tfopt?)"
        if hello.get("job") != fingerprint(workers):
            return f"this port belongs to another job, of {len(workers)} workers: {listed(workers, 4)}"
        if type(index) is not int or not 0 < index < len(workers):
            return f"there is no other worker {index!r} in this job of {len(workers)}"
        if index in self._joined:
            first = self._hellos[index]
            return f"there is a worker {index} already: process {first.get('pid')} on host {first.get('host')!r}"
        return None

    def _drop(self, channel: Channel) -> None:
        self._newcomers.pop(channel, None)
        channel.close()

    def _missing(self) -> MissingPeerError:
        start = self._start
        missing = [start.name(i) for i in range(1, len(start.workers)) if i not in self._joined]
        text = (
            f"Expected all {len(start.workers)} workers within {start.deadline_seconds:g} s. "
            f"Found no sign of {listed(missing, 8)}. What to do: check that it was started with the same list of "
            f"workers, and that no firewall or wrong address keeps it from {start.workers[0]}."
        )
        for channel in self._joined.values():
            channel.send(error=text)
        return MissingPeerError(text)


def join(start: Start, training: Channel) -> tuple[Channel, int]:
    """The other workers' side of the barrier: returns the channel to the chief, and the seed, once all have joined.

    Raises:
        MissingPeerError: If the chief does not answer in time, falls silent, or reports a missing worker.
        ClusterError: If the chief rejects this worker, or something else listens on its address.
    """
    hello = {"magic": MAGIC, "job": fingerprint(start.workers), "index": start.index, "pid": start.pid}
    due, last, is_stranger = time.monotonic() + start.deadline_seconds, "nobody answers there", False
    for pause in pauses(_LONGEST_PAUSE_SECONDS):
        try:
            chief = Channel(_connect(start.workers[0]))
        except OSError as error:
            last, is_stranger = error.strerror or str(error), False
        else:
            chief.send(**hello, host=socket.gethostname())
            answer = _await_go(chief, start, training)
            if isinstance(answer, int):
                return chief, answer
            last, is_stranger = answer, bool(chief.garbage)
            chief.close()
        if training in readable([training], min(pause, max(0.0, due - time.monotonic()))):
            stop_if_gone(training)
        if time.monotonic() >= due:
            break
    raise (ClusterError if is_stranger else MissingPeerError)(
        f"Expected {start.name(0)}, the chief, to answer within {start.deadline_seconds:g} s. Found: {last}. "
        f"What to do: check that it was started, and that this machine reaches {start.workers[0]}."
    )


def pauses(longest_seconds: float) -> Iterator[float]:
    """Yields how long to wait before each new attempt: ever longer, and at random, lest all workers ask at once."""
    chance = random.SystemRandom()  # user code seeds `random` itself, the same in all workers
    pause = min(_FIRST_PAUSE_SECONDS, longest_seconds)
    while True:
        yield pause * chance.uniform(0.5, 1.0)
        pause = min(2 * pause, longest_seconds)


def _await_go(chief: Channel, start: Start, training: Channel) -> int | str:
    """Returns the seed that the chief sends once all have joined, or why there is none."""
    silence = "something listens there and says nothing"
    due = time.monotonic() + _HELLO_SECONDS
    while time.monotonic() < due:
        for source in readable([chief, training], 1.0):
            if source is training:
                stop_if_gone(training)
        for message in chief.receive():
            if "welcome" in message:  # it is the chief, which has its own deadline
                due = time.monotonic() + start.deadline_seconds + _EXTRA_SECONDS
                silence = "it admitted this worker and has said nothing since (stopped, or cut off from the network?)"
            elif "rejected" in message:
                raise ClusterError(
                    f"Expected {start.name(0)}, the chief, to admit this process as {start.name(start.index)}. Found: "
                    f"it says that {message['rejected']}. What to do: give each job its own ports, and each worker its "
                    "own index."
                )
            elif "error" in message:
                raise MissingPeerError(message["error"])
            elif "go" in message:
                return int(message["go"])
        if chief.garbage:
            return f"something else listens there and answers {chief.garbage[:24]!r} (TensorFlow, of another job?)"
        if chief.closed:
            return "it answers and hangs up"
    return silence


def _listener(start: Start) -> socket.socket:
    port = parse_address(start.workers[0], whose="the chief").port
    try:
        return listen_everywhere(port, backlog=max(128, len(start.workers)))
    except OSError as error:
        raise ClusterError(
            f"Expected port {port} to be free for {start.name(0)}, the chief. Found: {os.strerror(error.errno or 0)}. "
            "What to do: end the job that holds it, or give this one another port."
        ) from error


def listen_everywhere(port: int, *, backlog: int = 1) -> socket.socket:
    """Listens on a port (0: any free one) of all interfaces, as TensorFlow's server does, or raises OSError."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def _connect(address: str) -> socket.socket:
    chief = parse_address(address, whose="the chief")
    connection = socket.create_connection((chief.host, chief.port), _CONNECT_SECONDS)
    # The local port may be one that a worker here is about to bind.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if connection.getsockname() == connection.getpeername():  # on a free port, Linux may connect a socket to itself
        connection.close()
        raise ConnectionRefusedError("nobody listens there")
    return connection


def stop_if_gone(training: Channel) -> None:
    """Ends this watchdog if its training process has gone."""
    training.receive()
    if training.closed:
        raise SystemExit(0)
