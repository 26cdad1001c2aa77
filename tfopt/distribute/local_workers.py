"""Processes on this machine that belong together: their output is one, and if one fails all end."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from tfopt.distribute.channel import readable
from tfopt.distribute.exit_codes import INTERRUPTED, RESTART
from tfopt.distribute.prefixing import Prefixer, write_whole

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM)

_SURVIVOR_SECONDS = 15.0  # after a survivor: the one that failed, whose code counts, may take seconds to end
_LEAVE_SECONDS = 30.0  # after a signal: the workers may be writing a checkpoint
_KILL_SECONDS = 10.0
_DRAIN_SECONDS = 4.0  # a watchdog outlives its worker by two seconds and holds its stderr


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
    """One process. It leads a group and a session of its own."""

    rank: int
    process: subprocess.Popen[bytes]
    streams: list[_Stream] = field(default_factory=list)

    def signal(self, number: int) -> None:
        """Sends a signal to all of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def ended(self) -> bool:
        """Whether it has ended. What it has left in its group is ended too."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # it stays a zombie: its group's number is not given away
        if os.waitid(os.P_PID, self.process.pid, options) is None:
            return False
        self.signal(signal.SIGKILL)
        self.process.wait()
        return True

    @property
    def code(self) -> int:
        """Its exit code, as a shell has it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def __str__(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"worker {self.rank} {how}"


class LocalWorkers:
    """Runs one command in several processes that differ in their environment.

    Each line of their output is prefixed with the worker's rank. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are
    passed on to their process groups; a second SIGINT or SIGTERM ends them: SIGTERM, and after ten seconds SIGKILL.

    Args:
        command: What to run.
        environs: The environment of each worker, in the order of their ranks.

    Example:
        >>> LocalWorkers(["hostname"], [os.environ, os.environ]).run()
        [0] node7
        [1] node7
        0
    """

    def __init__(self, command: Sequence[str], environs: Sequence[Mapping[str, str]]):
        self._command = command
        self._environs = environs
        self._running: list[_Worker] = []
        self._streams: list[_Stream] = []
        self._failures: list[int] = []
        self._signals: list[int] = []  # those to end, as they came
        self._end_at = self._kill_at = float("inf")
        self._ending = False
        self._unread: set[int] = set()  # of our outputs, those that cannot be written

    def run(self) -> int:
        """Runs them to their end.

        Returns:
            0 if all ended well, else the code of the first that failed, 128 + n if signal n killed it. 75 only if no
            other code is seen shortly after: a worker that ends since it has lost another is not the one that failed.
            130 after SIGINT, and 143 after a second SIGTERM.

        Raises:
            OSError: One could not be started. Those that were are ended.
        """
        with _wake_up(self._on_signal) as alarm:
            try:
                for rank, environ in enumerate(self._environs):
                    self._running.append(self._start(rank, environ))
                if self._signals:  # the last one that was started may have missed it
                    self._end()
                while self._running:
                    self._pass_on(alarm)
                    self._look_after()
                self._drain(alarm)
            finally:
                for worker in self._running:
                    worker.signal(signal.SIGKILL)
        return self._code()

    def _code(self) -> int:
        if signal.SIGINT in self._signals:
            return INTERRUPTED
        if self._failures:
            return next((code for code in self._failures if code != RESTART), RESTART)
        return 128 + self._signals[0] if self._ending else 0  # they were deaf to it, and did not end well

    def _start(self, rank: int, environ: Mapping[str, str]) -> _Worker:
        process = subprocess.Popen(
            self._command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_ends_with(os.getpid()),
        )
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                self._streams.append(_Stream(pipe, Prefixer(f"[{rank}] ".encode()), target))
        return _Worker(rank, process)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Passes it on at once, also while the output is blocked by a slow reader."""
        for worker in self._running:
            worker.signal(number)
        if number in _ENDING:
            self._signals.append(number)

    def _pass_on(self, alarm: socket.socket) -> None:
        """Waits up to a second for output, a signal or an end, and writes what has come."""
        sources: list[socket.socket | _Stream] = [alarm, *self._streams]
        for source in readable(sources, 1.0):
            if isinstance(source, _Stream):
                data = os.read(source.fileno(), 65536)
                self._write(source, source.prefixer.lines(data) if data else source.prefixer.end())
                if not data:
                    self._streams.remove(source)
                    source.pipe.close()
            else:
                source.recv(4096)

    def _write(self, stream: _Stream, data: bytes) -> None:
        if stream.target in self._unread:
            return
        try:
            write_whole(stream.target, data)
        except OSError as error:  # the training is worth more than its output
            self._unread.add(stream.target)
            self._say(f"the output can no longer be written ({error.strerror}); the workers go on without")

    def _look_after(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._running if worker.ended()]:
            self._running.remove(worker)
            if worker.code and not self._ending:
                self._failed(worker, now)
        if now >= self._end_at or len(self._signals) > 1:
            self._end()
        if now >= self._kill_at:
            for worker in self._running:
                worker.signal(signal.SIGKILL)

    def _failed(self, worker: _Worker, now: float) -> None:
        self._failures.append(worker.code)
        self._say(str(worker))
        wait_seconds = _SURVIVOR_SECONDS if worker.code == RESTART else 0.0
        self._end_at = min(self._end_at, now + (_LEAVE_SECONDS if self._signals else wait_seconds))

    def _end(self) -> None:
        """Begins to end those that still run. What they end with from now on is our doing."""
        if self._ending:
            return
        self._ending, self._kill_at = True, time.monotonic() + _KILL_SECONDS
        if self._running:
            self._say(f"ending {len(self._running)} more")
        for worker in self._running:
            worker.signal(signal.SIGTERM)

    def _drain(self, alarm: socket.socket) -> None:
        """Writes what is still on its way. A process that left its group may hold a pipe open for ever."""
        due = time.monotonic() + _DRAIN_SECONDS
        while self._streams and time.monotonic() < due:
            self._pass_on(alarm)
        for stream in self._streams:
            self._write(stream, stream.prefixer.end())

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            write_whole(2, f"[launch] {text}\n".encode())


@contextlib.contextmanager
def _wake_up(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[socket.socket]:
    """Handles signals, and gives a socket that has something to read after each, and after the end of a child."""
    alarm, ring = socket.socketpair()
    ring.setblocking(False)
    wanted = {signal.SIGCHLD: _nothing} | dict.fromkeys(_FORWARDED, on_signal)
    # One that is ignored stays so, for this process and its children: nohup, or a shell's background job. But where
    # SIGCHLD is ignored, the system forgets how a child ended.
    now = {number: signal.getsignal(number) for number in wanted}
    before = {
        number: handler for number, handler in now.items() if handler != signal.SIG_IGN or number == signal.SIGCHLD
    }
    with alarm, ring:
        signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
        for number in before:
            signal.signal(number, wanted[number])
        try:
            yield alarm
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler that is there so that the signal wakes this process up."""


def _ends_with(parent: int) -> Callable[[], None] | None:
    """What a child runs before its program, so that it is killed with this process, however that ends."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)  # loaded here: the child of a fork had better load nothing

    def die_with_parent() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was too late
            os._exit(1)

    return die_with_parent
