"""A function in a process of its own: what it leaves in memory, a crash and a hang stay there."""

import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tfopt.errors import TfoptError
from tfopt.processes import describe_end

# Loaded once, in the process that all others are forked from; none of them starts a thread or takes a GPU.
_PRELOADED = ["tensorflow", "keras", "tfopt.bench.cases"]
_READ_BYTES = 1 << 16
# What TensorFlow, XLA and CUDA remark. TF_CPP_MIN_LOG_LEVEL=3 asks for silence, which Abseil does not keep.
_REMARK = re.compile(
    r"[IWE]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+:\d+\] |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] |"
    r"WARNING: All log messages before absl::InitializeLog|To enable the following instructions: "
)


class ProcessError(TfoptError):
    """A process ended without an answer."""


class ProcessTimeoutError(ProcessError):
    """A process did not answer in time."""


def _write(line: str) -> None:
    print(line, file=sys.stderr)


def call(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    on_message: Callable[[Any], None] = lambda message: None,
    on_line: Callable[[str], None] = _write,
) -> Any:
    """Calls a function in a new process and returns what it returns; the process is gone afterwards.

    The process inherits the environment variables and the working folder. It dies with this process.

    Args:
        function: A module's own, of this package or on sys.path. Its first argument is a function that sends a message
            and returns once `on_message` has.
        *arguments: Its other arguments. They, what it returns and its messages must be picklable.
        seconds: How long it may take.
        on_message: Called with each message, as it arrives.
        on_line: Called with each line that the process writes; by default it goes to standard error.

    Raises:
        ProcessTimeoutError: If it took longer.
        ProcessError: If its process ended without an answer.
        Exception: What the function raises; as a RuntimeError of its text if it cannot be pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    _start_server()
    ours, theirs = context.Pipe()
    lines, output = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, output, dict(os.environ), os.getcwd(), function, arguments))
    process.start()
    theirs.close()
    output.close()
    written = _Lines(lines, on_line)
    try:
        return _receive(ours, written, process, seconds, on_message)
    finally:
        process.kill()
        process.join()
        written.close()
        ours.close()


def _start_server() -> None:
    """Starts the fork server unless it is running, and hides what its imports log."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class _Lines:
    """What a process writes, line by line."""

    def __init__(self, connection: "Connection[Any, Any]", on_line: Callable[[str], None]):
        self._connection, self._on_line = connection, on_line
        self.number = connection.fileno()
        self._rest = b""
        self._hides_remarks = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "3"
        self.open = True

    def read(self) -> None:
        """Reads what there is, at least something."""
        data = os.read(self.number, _READ_BYTES)
        self.open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._hand_over(line)

    def close(self) -> None:
        """Reads the rest. Processes that the process has left may still write."""
        while self.open and wait([self.number], 0):
            self.read()
        if self._rest:
            self._hand_over(self._rest)
        self._connection.close()

    def _hand_over(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        if not (self._hides_remarks and _REMARK.match(text)):
            self._on_line(text)


def _receive(
    connection: "Connection[Any, Any]",
    written: _Lines,
    process: BaseProcess,
    seconds: float,
    on_message: Callable[[Any], None],
) -> Any:
    due = time.monotonic() + seconds
    while True:
        left = max(0.0, due - time.monotonic())
        ready = wait([connection, written.number] if written.open else [connection], left)
        if written.number in ready:
            written.read()
        if connection not in ready:
            if left:
                continue
            break
        try:
            kind, value = connection.recv()
            if kind == "message":
                on_message(value)
                connection.send(None)
        except (EOFError, ConnectionError):
            process.join()
            raise ProcessError(
                f"Expected the process to answer. Found that it {describe_end(process.exitcode)}. What to do: read "
                "what it wrote; signal 9 usually means that the system ran out of memory."
            ) from None
        if kind == "returned":
            return value
        if kind == "raised":
            raise value
    raise ProcessTimeoutError(
        f"Expected an answer within {seconds:g} s. Found none, and ended the process. What to do: find out what hangs, "
        "or takes so long to compile."
    )


def _answer(
    connection: "Connection[Any, Any]",
    output: "Connection[Any, Any]",
    environ: dict[str, str],
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """What the new process does."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the one that waits, too, and that one ends this
    os.environ.clear()  # it has those of the time at which the first process was forked
    os.environ.update(environ)
    os.chdir(folder)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()

    def send(message: Any) -> None:
        connection.send(("message", message))
        connection.recv()  # writing it to disk must not disturb what is measured next

    try:
        found = ("returned", function(send, *arguments))
    except Exception as error:  # noqa: BLE001  it is raised again where it was called
        traceback.print_exc()
        found = ("raised", _portable(error))
    connection.send(found)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()  # the one that waits; the fork server lives as long as this one
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _portable(error: Exception) -> Exception:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  TensorFlow's errors, and any with arguments of their own
        return RuntimeError(f"{type(error).__name__}: {error}")
