"""Runs one command in several local processes with one output and one exit code; if one fails, all end."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO

from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.watchdog.channel import readable
from tfopt.distribute.watchdog.watch import RESTART
from tfopt.processes import die_with, exit_code, signal_group

_EXIT_INTERRUPTED = 130
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM)

_SURVIVOR_SECONDS = 15.0  # after a survivor ended: the worker that failed, whose code counts, may take seconds
_LEAVE_SECONDS = 30.0  # after a signal: the workers may be writing a checkpoint
_KILL_SECONDS = 10.0
_LOOK_SECONDS = 0.1  # how often it looks whether a worker has ended
_DRAIN_SECONDS = 4.0  # a watchdog outlives its worker by two seconds and keeps its stderr open

_LINE_BYTES = 65536  # longer lines are cut into pieces
_REDRAW_SECONDS = 5.0


@contextlib.contextmanager
def local_cluster(workers: int) -> Iterator[list[str]]:
    """Yields the TF_CONFIG of each of `workers` local workers, by rank, and reserves their ports meanwhile.

    Example:
        >>> with local_cluster(2) as configs:
        ...     processes = [Popen(command, env=os.environ | {"TF_CONFIG": config}) for config in configs]
    """
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(workers):
            port = stack.enter_context(socket.socket())  # bound, not listening: nobody else gets it before TensorFlow
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TensorFlow sets it as well, so both may bind
            port.bind(("127.0.0.1", 0))
            addresses.append("{}:{}".format(*port.getsockname()))
        yield [json.dumps(Cluster("launch", tuple(addresses), rank).tf_config()) for rank in range(workers)]


class Prefixer:
    """Splits a stream of bytes into lines and prefixes each.

    Of a line that a progress bar redraws with carriage returns, only the last state is kept; until the line ends, its
    current state is shown every few seconds.

    Example:
        >>> Prefixer(b"[0] ").lines(b"one\\ntwo\\nthr")
        b'[0] one\\n[0] two\\n'
    """

    def __init__(self, prefix: bytes, *, clock: Callable[[], float] = time.monotonic):
        self._prefix = prefix
        self._clock = clock
        self._rest = b""
        self._drawn_at = clock()

    def lines(self, data: bytes) -> bytes:
        """Returns the lines that `data` completes, prefixed. An incomplete line is kept for the next call."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        out = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole]
        if b"\r" in self._rest:
            drawn, _, self._rest = self._rest.rpartition(b"\r")
            state = drawn.rstrip(b"\r").rpartition(b"\r")[2]
            if state and self._clock() - self._drawn_at >= _REDRAW_SECONDS:
                self._drawn_at = self._clock()
                out.append(state)
            if state and not self._rest:  # it stays until drawn over, and may be the last state
                self._rest = state + b"\r"
        while len(self._rest) >= _LINE_BYTES:
            out.append(self._rest[:_LINE_BYTES])
            self._rest = self._rest[_LINE_BYTES:]
        return b"".join(self._prefix + line + b"\n" for line in out)

    def end(self) -> bytes:
        """Returns what is left at the end of the stream as a line."""
        return self.lines(b"\n") if self._rest else b""


def write_whole(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, in pieces if need be; raises OSError if nobody reads it or the disk is full."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program made the terminal non-blocking
            select.select([], [descriptor], [], 1.0)


@dataclass(eq=False)
class _Stream:
    """One output of one worker, and where it goes."""

    pipe: IO[bytes]
    prefixer: Prefixer
    target: int

    def fileno(self) -> int:
        return self.pipe.fileno()


@dataclass(eq=False)
class _Worker:
    """One process, leader of its own group and session."""

    rank: int
    process: subprocess.Popen[bytes]

    @property
    def code(self) -> int:
        """Exit code as a shell reports it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def __str__(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"worker {self.rank} {how}"


class LocalWorkers:
    """Runs one command in several processes that differ only in their environment.

    Each line of output is prefixed with the worker's rank. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded
    to the workers' process groups. After a second SIGINT or SIGTERM, workers get SIGTERM and ten seconds later SIGKILL.

    Example:
        >>> LocalWorkers(["hostname"], [os.environ, os.environ]).run()
        [0] node7
        [1] node7
        0
    """

    def __init__(self, command: Sequence[str], environs: Sequence[Mapping[str, str]]):
        self._command = command
        self._environs = environs  # in rank order
        self._running: list[_Worker] = []
        self._streams: list[_Stream] = []
        self._failures: list[int] = []
        self._signals: list[int] = []  # the SIGINTs and SIGTERMs received
        self._end_at = self._kill_at = float("inf")
        self._ending = False
        self._broken: set[int] = set()  # the launcher's outputs that nobody reads any more

    def run(self) -> int:
        """Runs the workers to their end. Raises OSError if one cannot be started, after killing those already started.

        Returns:
            0 if all succeeded, otherwise the code of the first that failed, 128 + n if signal n killed it. 75 only if
            no other code follows shortly: a worker that lost another is not the one that failed. 130 after SIGINT, 143
            after a second SIGTERM.
        """
        with _handled(self._on_signal):
            try:
                for rank, environ in enumerate(self._environs):
                    self._running.append(self._start(rank, environ))
                if self._signals:  # the last worker may have started too late to get it
                    self._end()
                while self._running:
                    self._forward_output()
                    self._check_workers()
                self._drain()
            finally:
                for worker in self._running:
                    signal_group(worker.process, signal.SIGKILL)
        return self._code()

    @property
    def was_signalled(self) -> bool:
        """Whether a SIGINT or SIGTERM to this process ended the workers."""
        return bool(self._signals)

    def _code(self) -> int:
        if signal.SIGINT in self._signals:
            return _EXIT_INTERRUPTED
        if self._failures:
            return next((code for code in self._failures if code != RESTART), RESTART)
        return 128 + self._signals[0] if self._ending else 0  # workers that ignored the signal did not succeed

    def _start(self, rank: int, environ: Mapping[str, str]) -> _Worker:
        process = subprocess.Popen(
            self._command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                self._streams.append(_Stream(pipe, Prefixer(f"[{rank}] ".encode()), target))
        return _Worker(rank, process)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forwards a signal immediately, even while a slow reader blocks the output."""
        for worker in self._running:
            signal_group(worker.process, number)
        if number in _ENDING:
            self._signals.append(number)

    def _forward_output(self) -> None:
        """Waits a moment for output, and writes it."""
        for stream in readable(self._streams, _LOOK_SECONDS):
            data = os.read(stream.fileno(), 65536)
            self._write(stream, stream.prefixer.lines(data) if data else stream.prefixer.end())
            if not data:
                self._streams.remove(stream)
                stream.pipe.close()

    def _write(self, stream: _Stream, data: bytes) -> None:
        if stream.target in self._broken:
            return
        try:
            write_whole(stream.target, data)
        except OSError as error:  # the training is worth more than its output
            self._broken.add(stream.target)
            self._say(f"the output can no longer be written ({error.strerror}); the workers go on without it")

    def _check_workers(self) -> None:
        now = time.monotonic()
        for worker in [each for each in self._running if exit_code(each.process, wait=False) is not None]:
            self._running.remove(worker)
            if worker.code and not self._ending:
                self._failed(worker, now)
        if now >= self._end_at or len(self._signals) > 1:
            self._end()
        if now >= self._kill_at:
            for worker in self._running:
                signal_group(worker.process, signal.SIGKILL)

    def _failed(self, worker: _Worker, now: float) -> None:
        self._failures.append(worker.code)
        self._say(str(worker))
        wait_seconds = _SURVIVOR_SECONDS if worker.code == RESTART else 0.0
        self._end_at = min(self._end_at, now + (_LEAVE_SECONDS if self._signals else wait_seconds))

    def _end(self) -> None:
        """Ends the remaining workers. Their exit codes no longer count as failures."""
        if self._ending:
            return
        self._ending, self._kill_at = True, time.monotonic() + _KILL_SECONDS
        if self._running:
            self._say(f"ending {len(self._running)} more")
        for worker in self._running:
            signal_group(worker.process, signal.SIGTERM)

    def _drain(self) -> None:
        """Writes the remaining output, with a time limit: a process that left its group may hold a pipe open."""
        due = time.monotonic() + _DRAIN_SECONDS
        while self._streams and time.monotonic() < due:
            self._forward_output()
        for stream in self._streams:
            self._write(stream, stream.prefixer.end())

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            write_whole(2, f"[launch] {text}\n".encode())


@contextlib.contextmanager
def _handled(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals. Those ignored by nohup or a shell's background job stay ignored."""
    heard = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in heard}
    # While this one is ignored, the system discards how a child ended.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
