"""Starts a Python process that dies with this one, talks with it, and ends it with all that it has started."""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from multiprocessing.connection import Connection  # imported where a child starts: the launcher starts none

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: a forked child should load nothing


class Child:
    """A Python process that calls a function with a connection to this one. As a context manager, it ends with it.

    It finds the modules that this process finds, and nothing on its standard input. Ctrl-C does not reach it. On Linux
    it dies with the thread that starts it; elsewhere it sees only that the connection is closed.

    Args:
        function: One that its module has under its name. It gets its end of the connection.
        environ: Its environment variables; PYTHONPATH is replaced.

    Example:
        >>> with Child(serve) as child:
        ...     child.connection.send("a picklable message")
        ...     child.connection.recv()
    """

    def __init__(self, function: Callable[["Connection[Any, Any]"], object], environ: Mapping[str, str] = os.environ):
        from multiprocessing import Pipe

        code = f"from {__name__} import _run; _run({os.getpid()}, {function.__module__!r}, {function.__name__!r})"
        self.connection, theirs = Pipe()
        """Raises EOFError or OSError once the process has ended."""
        with ExitStack() as stack:
            stack.callback(self.connection.close)
            self._output = stack.enter_context(tempfile.TemporaryFile())
            stack.enter_context(theirs)
            self.process = subprocess.Popen(
                # -P: no file of the working directory may pass for a module; -u: what it writes stays in order.
                [sys.executable, "-P", "-u", "-c", code],
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                env={**environ, "PYTHONPATH": python_path()},
                start_new_session=True,
            )
            theirs.close()
            stack.pop_all()  # `close` does it

    def last_words(self, most: int = 2000) -> str:
        """The end of what it has written to its outputs, up to `most` bytes."""
        handle = self._output.fileno()
        begin = max(0, os.fstat(handle).st_size - most)
        return os.pread(handle, most, begin).decode(errors="replace").strip()  # it writes where a seek would lead

    def close(self) -> None:
        """Kills the process and its group. A second call does nothing."""
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _run(parent: int, module: str, function: str) -> None:
    """What a child does."""
    from multiprocessing.connection import Connection

    die_with(parent)
    connection: Connection[Any, Any] = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    getattr(importlib.import_module(module), function)(connection)


def die_with(parent: int) -> None:
    """Has Linux kill this process when the thread that started it ends; elsewhere it does nothing.

    Args:
        parent: Number of the process that started this one, which may have ended already.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def python_path() -> str:
    """Returns the PYTHONPATH with which another Python finds the modules that this one finds."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str))  # as import does


@contextmanager
def limit(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[threading.Event]:
    """Kills a process and its group if the block takes longer, so that a wait for it ends; yields what is set then."""
    late = threading.Event()

    def end() -> None:
        late.set()
        signal_group(process, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Sends a signal to a process that leads a group, and to its group, unless its exit code is known already."""
    if process.returncode is None:  # else its number may be another's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def exit_code(process: "subprocess.Popen[bytes]", *, wait: bool = True) -> int | None:
    """Returns the exit code of a process that leads a group, -n if signal n ended it; None if it is still running.

    What it has left in its group is killed.
    """
    # Leaves a zombie, so that the group's number is not given to another.
    options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
    if process.returncode is None:
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            if os.waitid(os.P_PID, process.pid, options) is None:
                return None
        signal_group(process, signal.SIGKILL)
        process.wait()
    return process.returncode


def describe_end(code: int | None) -> str:
    """Returns how a process ended, as a part of a sentence."""
    return f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
