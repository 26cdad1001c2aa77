"""A function in a process of its own: what it leaves in memory, a crash and a hang stay there."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tfopt.errors import TfoptError

# Loaded once, in the process that all others are forked from; none of them starts a thread or takes a GPU.
_PRELOADED = ["tensorflow", "keras", "tfopt.bench.cases"]


class ProcessError(TfoptError):
    """A process ended without an answer."""


class ProcessTimeoutError(ProcessError):
    """A process did not answer in time."""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    on_message: Callable[[Any], None] = lambda message: None,
) -> Any:
    """Calls a function in a new process and returns what it returns; the process is gone afterwards.

    The process inherits the environment variables and the working folder. What it prints goes to standard error. It
    dies with this process.

    Args:
        function: A module's own, of this package or on sys.path. Its first argument is a function that sends a message
            and returns once `on_message` has.
        *arguments: Its other arguments. They, what it returns and its messages must be picklable.
        seconds: How long it may take.
        on_message: Called with each message, as it arrives.

    Raises:
        ProcessTimeoutError: If it took longer.
        ProcessError: If its process ended without an answer.
        Exception: What the function raises; as a RuntimeError of its text if it cannot be pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, dict(os.environ), os.getcwd(), function, arguments))
    process.start()
    theirs.close()
    try:
        return _receive(ours, process, seconds, on_message)
    finally:
        process.kill()
        process.join()
        ours.close()


def _receive(
    connection: "Connection[Any, Any]", process: BaseProcess, seconds: float, on_message: Callable[[Any], None]
) -> Any:
    due = time.monotonic() + seconds
    while connection.poll(max(0.0, due - time.monotonic())):
        try:
            kind, value = connection.recv()
            if kind == "message":
                on_message(value)
                connection.send(None)
        except (EOFError, ConnectionError):
            process.join()
            raise ProcessError(
                f"Expected the process to answer. Found that it {_ended(process.exitcode)}. What to do: read what it "
                "wrote; a process that the system kills (signal 9) mostly lacks memory."
            ) from None
        if kind == "returned":
            return value
        if kind == "raised":
            raise value
    raise ProcessTimeoutError(
        f"Expected an answer within {seconds:g} s. Found none, and ended the process. What to do: look for what hangs "
        "or compiles for so long."
    )


def _ended(code: int | None) -> str:
    return f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"


def _answer(
    connection: "Connection[Any, Any]",
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
    os.dup2(2, 1)  # standard output is for results

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
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _portable(error: Exception) -> Exception:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  TensorFlow's errors, and any with arguments of their own
        return RuntimeError(f"{type(error).__name__}: {error}")
