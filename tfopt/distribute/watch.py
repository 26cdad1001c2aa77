"""What a training process keeps of its watchdog: a thread that gives signs of life and hears who was lost."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import lazy_loader

import tfopt
from tfopt.distribute.barrier import MissingPeerError
from tfopt.distribute.channel import Channel, readable
from tfopt.distribute.exit_codes import RESTART
from tfopt.distribute.intervals import Intervals
from tfopt.errors import ClusterError

# Where tfopt stands, and the one package that importing it needs.
_PATHS = [str(Path(module).parents[1]) for module in (tfopt.__file__, lazy_loader.__file__)]
# -I and -S: neither the folder that training runs in nor PYTHONPATH may put another `socket.py` before Python's.
_COMMAND = f"import sys; sys.path += {_PATHS!r}; from tfopt.distribute.watchdog import main; main()"
_SPARE_SECONDS = 15.0  # that the watchdog may answer later than at the deadline
_FLUSH_SECONDS = 1.0

# What TensorFlow raises when a peer goes away. The class alone does not tell it from an error of one's own.
_COMMUNICATION = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "InternalError")
_SAID_CHARACTERS = 300


class Workers(Protocol):
    """What Watch needs of a Cluster."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses, in the order of the ranks."""

    @property
    def index(self) -> int:
        """The rank of this one."""


class Watch:
    """The watch over this training process and its peers, from the start on.

    `tfopt.distribute.strategy()` starts it; call it yourself only in front of a strategy that you make yourself.
    A worker that is lost ends all others within 90 s with exit code 75 and its name on stderr.

    Attributes:
        seed: A random number below 2**31, the same in all workers of this start.

    Example:
        >>> watch = Watch.start(tfopt.distribute.resolve())
        >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
    """

    _running: "Watch | None" = None

    def __init__(self, channel: Channel, process: subprocess.Popen[bytes], seed: int, intervals: Intervals):
        self.seed = seed
        self._channel = channel
        self._process = process
        self._intervals = intervals
        self._over = False  # it may end, and so may the watchdog
        self._left = ""  # what to say if the communication breaks since the chief has ended well
        self._exit_code: object = None

    @classmethod
    def start(cls, cluster: Workers, *, deadline_seconds: float = 60.0, intervals: Intervals | None = None) -> "Watch":
        """Waits until all workers are there, and watches them from then on.

        Call it in every worker, before TensorFlow's server takes the port. While it waits, Ctrl-C and SIGTERM work.
        A second call for the same workers returns the watch that runs.

        Args:
            cluster: The workers, at least two, and which of them this process is.
            deadline_seconds: How long to wait for the others. Default: 60.
            intervals: Default: those of the environment (TFOPT_WATCH_…).

        Raises:
            tfopt.distribute.barrier.MissingPeerError: A worker, named in the text, did not come in time.
            ClusterError: The port is taken, another job or another worker of this index is there, or one of the
                intervals is wrong.
            ValueError: `deadline_seconds` is not positive.
        """
        if not 0 < deadline_seconds < threading.TIMEOUT_MAX:
            raise ValueError(
                f"Expected deadline_seconds to be a positive number of seconds. Received: {deadline_seconds!r}. "
                "What to do: leave it out for 60, or give a larger one if workers start minutes apart."
            )
        if cls._running is None:
            intervals = Intervals.from_environ() if intervals is None else intervals
            channel, process = _start_watchdog(cluster, deadline_seconds, intervals)
            try:
                # Twice: a chief that comes at the last moment waits for the others as long again.
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
        """Tells the other workers that this one has trained to its end; each process that ends does so by itself."""
        if cls._running is not None:
            cls._running._say_bye()

    def _begin(self) -> None:
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._say_bye)
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        self._previous_exit, sys.exit = sys.exit, self._on_exit
        threading.Thread(target=self._run, name="tfopt-watch", daemon=True).start()

    def _run(self) -> None:
        while not self._over:
            for message in self._channel.receive():
                if "lost" in message and not self._over:
                    _end(message["lost"])
                if "over" in message:
                    self._left, self._over = message["over"], True
            text = self._watchdog_lost()
            if text and not self._over:
                self._process.kill()  # it may have been stopped, and would stay for ever
                _end(text)
            self._channel.send(beat=1)
            readable([self._channel], self._intervals.beat_seconds)

    def _watchdog_lost(self) -> str | None:
        silent = time.monotonic() - self._channel.heard_at
        if not self._channel.closed and silent < self._intervals.silent_seconds:
            return None
        found = "it has ended (killed?)" if self._channel.closed else f"it has been silent for {silent:.0f} s"
        return (
            f"Expected this worker's watchdog, process {self._process.pid}, to go on. Found: {found}. What to do: "
            "start all workers again; without it a lost worker would leave the others waiting for ever."
        )

    def _on_exception(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """Tells the others why this worker fails, or finds out who made its communication fail."""
        lost_somebody = _broke_communication(error) and not self._over
        if not lost_somebody:  # told first: a reader of stderr that has stopped would hold the traceback up
            self._say_failure(kind, error)
        self._previous_hook(kind, error, where)
        if self._left and _broke_communication(error):
            _end(self._left)
        if lost_somebody:
            self._channel.send(asks=True)
            # Until the watchdogs have seen who has stopped or gone: then the thread ends this process.
            try:
                time.sleep(max(self._intervals.silent_seconds, self._intervals.stopped_seconds) * 1.25)
            finally:  # Ctrl-C
                self._say_failure(kind, error)

    def _say_failure(self, kind: type[BaseException], error: BaseException) -> None:
        text = f"it failed: {kind.__name__}: {error}"[:_SAID_CHARACTERS]
        self._say(failed=text, on_purpose=issubclass(kind, KeyboardInterrupt))

    def _on_exit(self, code: Any = None) -> NoReturn:
        """Stands in for sys.exit(): nothing else tells the exit code while Python ends."""
        if threading.current_thread() is threading.main_thread():  # in another one it ends that thread alone
            self._exit_code = code
        self._previous_exit(code)

    def _say_bye(self) -> None:
        code = self._exit_code
        if code in (None, 0):
            self._say(bye=True)
        else:  # a text is written to stderr, and the code is 1
            text = f"it ended with exit code {code if isinstance(code, int) else f'1: {code}'}"
            self._say(failed=text[:_SAID_CHARACTERS], on_purpose=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends as soon as the others know
            self._process.wait(self._intervals.linger_seconds + 1)

    def _say(self, **message: Any) -> None:
        """Says how this process ends. The first word counts."""
        if not self._over:
            self._over = True
            self._channel.send(**message)

    def _forget(self) -> None:
        """In a forked child, which is not the one that is watched and must not speak for it."""
        self._over = True
        self._channel.close()
        Watch._running = None


def _start_watchdog(
    cluster: Workers, deadline_seconds: float, intervals: Intervals
) -> tuple[Channel, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-S", "-c", _COMMAND, f"tfopt-watchdog of worker {cluster.index}"]
    with theirs:
        # In a session of its own: a signal to the training process's group is not meant for the one that reports it.
        process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True)
    setup = {
        "workers": cluster.workers,
        "index": cluster.index,
        "pid": os.getpid(),
        "deadline_seconds": deadline_seconds,
        "intervals": intervals.to_dict(),
    }
    with contextlib.suppress(BrokenPipeError):  # it has died at once, as is seen when its answer is awaited
        ours.sendall(json.dumps(setup).encode() + b"\n")
    return Channel(ours), process


def _await_go(channel: Channel, due: float) -> int:
    """Returns the seed that the watchdog sends when all workers are there."""
    while time.monotonic() < due and not channel.closed:
        readable([channel], 1.0)
        for message in channel.receive():
            if "go" not in message:
                raise (MissingPeerError if message["missing"] else ClusterError)(message["error"])
            return int(message["go"])
    found = "it ended" if channel.closed else "it says nothing"
    raise ClusterError(
        f"Expected this worker's watchdog to tell when all workers are there. Found: {found}. What to do: look for its "
        f"own message above; it runs {sys.executable} with the modules in {_PATHS}."
    )


def _broke_communication(error: BaseException) -> bool:
    return type(error).__module__.startswith("tensorflow") and (
        type(error).__name__ in _COMMUNICATION or "Collective ops is aborted" in str(error)
    )


def _end(text: str) -> NoReturn:
    """Ends this process from a thread: the main thread may wait for a lost worker and never come back."""
    with contextlib.suppress(RuntimeError):  # no more threads while Python ends
        flush = threading.Thread(target=_flush, daemon=True)  # a thread, for the main one may hold a stream's lock
        flush.start()
        flush.join(_FLUSH_SECONDS)
    with contextlib.suppress(OSError):  # there may be no stderr
        os.write(2, f"\n{text} This process ends with exit code {RESTART}.\n".encode())
    os._exit(RESTART)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
