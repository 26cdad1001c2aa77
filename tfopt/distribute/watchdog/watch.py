"""The training process's side of its watchdog: a thread that sends heartbeats and learns which worker was lost."""

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import lazy_loader

import tfopt
from tfopt.checks import number
from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.watchdog.barrier import MissingPeerError, Start
from tfopt.distribute.watchdog.channel import Channel, readable
from tfopt.distribute.watchdog.progress import Deadline, progress
from tfopt.distribute.watchdog.training_process import SAME_STEPS, Intervals
from tfopt.errors import ClusterError, PipelineError, UnsupportedError

RESTART = 75  # exit code of a worker that lost another and should be restarted: EX_TEMPFAIL of sysexits.h
RECURS = 1  # exit code of a worker that lost another, where a restart would end in the same way

# Where to find tfopt, and the one package it needs to be imported.
_PATHS = [str(Path(module).parents[1]) for module in (tfopt.__file__, lazy_loader.__file__)]
# -I and -S: neither the working directory nor PYTHONPATH may put another `socket.py` before Python's.
_COMMAND = f"import sys; sys.path += {_PATHS!r}; from tfopt.distribute.watchdog.process import main; main()"
_SPARE_SECONDS = 15.0  # for the watchdog to answer after the deadline
_FLUSH_SECONDS = 1.0

# What TensorFlow raises when a peer goes away. The class alone does not tell it from an error in the user's code.
_COMMUNICATION = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "InternalError")
# What it raises when workers disagree about a collective operation, up to the end of the sentence.
_MISMATCH = re.compile(
    r"(Collective instance \d+ expected|Shape mismatch in the collective instance|Collective Op .* that group has) .*"
)
_RECURRING = (PipelineError, UnsupportedError)  # errors that would end a restart, too
_AS_IT_SAYS = "look at that worker's output first; a restart would end in the same way"
_REPORTED_CHARACTERS = 300


class Watch:
    """Watches this training process and its peers.

    `tfopt.distribute.strategy()` starts it; start it yourself only for a strategy that you create yourself. If a worker
    is lost, all others name it on stderr and exit with code 75 within 90 s; with 1 if it took other steps
    than they did, or failed because of its data.

    Example:
        >>> watch = Watch.start(tfopt.distribute.resolve())
        >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
    """

    _running: "Watch | None" = None

    def __init__(self, channel: Channel, process: subprocess.Popen[bytes], seed: int, intervals: Intervals):
        self.seed = seed
        """A random number below 2**31, the same in all workers."""
        self._channel = channel
        self._process = process
        self.intervals = intervals
        """How long it waits before it acts."""
        self._over = False  # this process may end, and so may the watchdog
        self._deadline = Deadline(intervals, threading.get_ident())
        self._stuck = ""
        self._chief_left = ""  # what to say if the communication breaks after the chief ended well
        self._exit_code: object = None

    @classmethod
    def start(cls, cluster: Cluster, *, deadline_seconds: float = 60.0, intervals: Intervals | None = None) -> "Watch":
        """Waits until all workers have joined, and watches them from then on.

        Call it in every worker before TensorFlow's server binds the port. Ctrl-C and SIGTERM work while it waits. A
        second call returns the running watch.

        Args:
            cluster: From `resolve()`, with at least two workers.
            deadline_seconds: How long to wait for the others. Default: 60.
            intervals: Default: from the environment (TFOPT_WATCH_…).

        Raises:
            tfopt.distribute.watchdog.barrier.MissingPeerError: If a worker, named in the message, did not join in time.
            ClusterError: If the port is taken, another job or another worker of this index has joined, or one of the
                intervals is wrong.
            TypeError: If `deadline_seconds` is not a number.
            ValueError: If it is not positive and finite.
        """
        number("deadline_seconds", deadline_seconds, "Increase it from 60 if workers start minutes apart.", above=0)
        if cls._running is None:
            intervals = Intervals.from_environ() if intervals is None else intervals
            channel, process = _start_watchdog(cluster, deadline_seconds, intervals)
            try:
                # Doubled: a chief that starts at the last moment waits just as long for the others.
                seed = _await_go(channel, time.monotonic() + 2 * deadline_seconds + _SPARE_SECONDS)
            except BaseException:
                channel.close()
                process.kill()
                process.wait()
                raise
            cls._running = cls(channel, process, seed, intervals)
            cls._running._begin()
        return cls._running

    @classmethod
    def say_bye(cls) -> None:
        """Tells the other workers that this one has finished. A process that exits does so by itself."""
        if cls._running is not None:
            cls._running._say_bye()

    def _begin(self) -> None:
        os.register_at_fork(after_in_child=self._detach)
        atexit.register(self._say_bye)
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        self._previous_exit, sys.exit = sys.exit, self._on_exit
        threading.Thread(target=self._run, name="tfopt-watch", daemon=True).start()

    def _run(self) -> None:
        while not self._over:
            for message in self._channel.receive():
                if "lost" in message and not self._over:
                    _exit(message["lost"], RECURS if message["recurs"] else RESTART)
                if "over" in message:
                    self._chief_left, self._over = message["over"], True
            text = self._watchdog_lost()
            if text and not self._over:
                self._process.kill()  # a stopped one would never end
                _exit(text, RESTART)
            self._channel.send(beat=1)
            if not self._stuck and (stuck := self._deadline.missed()):
                self._stuck = stuck
                self._channel.send(stuck=stuck)
            readable([self._channel], self.intervals.beat_seconds)
        if self._chief_left and self.intervals.progress_seconds is not None:
            self._outlive_the_chief()

    def _outlive_the_chief(self) -> None:
        """Keeps to the deadline for progress, without watchdogs, which have ended."""
        while not (stuck := self._deadline.missed()):
            time.sleep(self.intervals.beat_seconds)
        expected = "Expected this worker to keep running, though the chief has ended."
        _exit(f"{expected} Found: {stuck}. What to do: find out what held it up, then restart all workers.", RESTART)

    def _watchdog_lost(self) -> str | None:
        silent = time.monotonic() - self._channel.heard_at
        if not self._channel.closed and silent < self.intervals.silent_seconds:
            return None
        found = "it has ended (killed?)" if self._channel.closed else f"it has been silent for {silent:.0f} s"
        return (
            f"Expected this worker's watchdog, process {self._process.pid}, to keep running. Found: {found}. What to "
            "do: restart all workers; without it, the others would wait for a lost worker indefinitely."
        )

    def _on_exception(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """Tells the others why this worker fails, or finds out which worker broke its communication."""
        mismatch = _mismatch(error)
        lost_peer = not mismatch and _broke_communication(error) and not self._over
        if not lost_peer:  # before the traceback, which blocks if nobody reads stderr
            self._report_failure(kind, error)
        self._previous_hook(kind, error, where)
        if mismatch:
            expected = "Expected all workers to run the same collective operations."
            _write(f"{expected} Found: {mismatch.rstrip('.')}. What to do: {SAME_STEPS}.{_place()}")
        if self._chief_left and _broke_communication(error):
            _exit(self._chief_left, RECURS)
        if lost_peer:
            self._channel.send(asks=True)
            # Waits until the watchdogs know which worker is lost; then the thread ends this process.
            try:
                time.sleep(max(self.intervals.silent_seconds, self.intervals.stopped_seconds) * 1.25)
            finally:  # Ctrl-C
                self._report_failure(kind, error)

    def _report_failure(self, kind: type[BaseException], error: BaseException) -> None:
        mismatch = _mismatch(error)
        text = f"it failed{_place('at {}')}: {kind.__name__}: {mismatch or error}"
        remedy = SAME_STEPS if mismatch else _AS_IT_SAYS if issubclass(kind, _RECURRING) else ""
        self._report(failed=_shortened(text), on_purpose=issubclass(kind, KeyboardInterrupt), remedy=remedy)

    def _on_exit(self, code: Any = None) -> NoReturn:
        """Replaces sys.exit, because nothing else knows the exit code while Python shuts down."""
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends only that thread
            self._exit_code = code
        self._previous_exit(code)

    def _say_bye(self) -> None:
        code = self._exit_code
        if code in (None, 0):
            self._report(bye=f"it had ended before, by itself{_place('and had come to {}')}")
        else:  # Python prints a string to stderr and ends with 1
            text = f"it ended with exit code {code if isinstance(code, int) else f'1: {code}'}"
            self._report(failed=_shortened(text), on_purpose=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends as soon as the others know
            self._process.wait(self.intervals.linger_seconds + 1)

    def _report(self, **message: Any) -> None:
        """Reports how this process ends. Only the first report counts."""
        if not self._over:
            self._over = True
            self._channel.send(**message)

    def _detach(self) -> None:
        """Runs in a forked child, which is not watched and must not speak for its parent."""
        self._over = True
        self._channel.close()
        Watch._running = None


def _start_watchdog(
    cluster: Cluster, deadline_seconds: float, intervals: Intervals
) -> tuple[Channel, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-S", "-c", _COMMAND, f"tfopt-watchdog of worker {cluster.index}"]
    with theirs:
        # In its own session: signals to the training process's group must spare the watchdog, which reports its end.
        process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True)
    start = Start(cluster.workers, cluster.index, os.getpid(), deadline_seconds)
    setup = {"start": asdict(start), "intervals": asdict(intervals)}
    with contextlib.suppress(BrokenPipeError):  # if it died at once, `_await_go` reports that
        ours.sendall(json.dumps(setup).encode() + b"\n")
    return Channel(ours), process


def _await_go(channel: Channel, due: float) -> int:
    """Returns the seed that the watchdog sends once all workers have joined."""
    while time.monotonic() < due and not channel.closed:
        readable([channel], 1.0)
        for message in channel.receive():
            if "go" not in message:
                raise (MissingPeerError if message["missing"] else ClusterError)(message["error"])
            return int(message["go"])
    found = "it ended" if channel.closed else "it says nothing"
    raise ClusterError(
        f"Expected this worker's watchdog to report that all workers have joined. Found: {found}. What to do: look for "
        f"its own message above; it runs {sys.executable} with the modules in {_PATHS}."
    )


def _broke_communication(error: BaseException) -> bool:
    return type(error).__module__.startswith("tensorflow") and (
        type(error).__name__ in _COMMUNICATION or "Collective ops is aborted" in str(error)
    )


def _mismatch(error: BaseException) -> str:
    """What TensorFlow says on a collective operation about which workers disagree; empty for other errors."""
    found = _MISMATCH.search(str(error)) if type(error).__module__.startswith("tensorflow") else None
    return found[0] if found else ""


def _exit(text: str, code: int) -> NoReturn:
    """Ends this process from a thread, since the main thread may wait for the lost worker indefinitely."""
    with contextlib.suppress(RuntimeError):  # no new threads while Python shuts down
        flush = threading.Thread(target=_flush, daemon=True)  # the main thread may hold a stream's lock
        flush.start()
        flush.join(_FLUSH_SECONDS)
    _write(f"{text}{_place()} This process ends with exit code {code}.")
    os._exit(code)


def _shortened(text: str) -> str:
    return text if len(text) <= _REPORTED_CHARACTERS else f"{text[: _REPORTED_CHARACTERS - 1]}…"


def _place(sentence: str = "This worker had come to {}.") -> str:
    """Says where this process is in its training; empty if that is not known."""
    return progress.place and " " + sentence.format(progress.place)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # there may be no stderr
        os.write(2, f"\n{text}\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def restore_sigterm() -> None:
    """Gives SIGTERM back to Python after TensorFlow's distributed runtime has started. Call it in the main thread.

    That runtime installs a handler that only records the signal. This restores what `signal.signal` set before, or the
    default action. `tfopt.distribute.strategy()` calls it; call it yourself only after a strategy that you create
    yourself. In other threads, such as Ray's workers, it does nothing, since Python cannot change handlers there.

    Example:
        >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
        >>> restore_sigterm()
    """
    handler = signal.getsignal(signal.SIGTERM)
    # None: the handler was not set from Python and cannot be set again.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
