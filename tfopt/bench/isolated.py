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
    """A process ended without an answer, or did not answer in time."""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    on_message: Callable[[Any], None] = lambda message: None,
) -> Any:
    """Calls a function in a new process and returns what it returns; the process is gone afterwards.

    It takes over the environment variables and the folder. What it prints goes to standard error. It dies with this
    process.

    Args:
        function: A module's own, of this package or on sys.path. Its first argument is a function that sends a message.
        *arguments: Its others. They, what it returns and its messages must be picklable.
        seconds: How long it may take.
        on_message: Called with each message, as it arrives.

    Returns:
        What the function returns.

    Raises:
        ProcessError: It took longer, or its process ended.
        Exception: What the function raises; as a RuntimeError of its text where it cannot be pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
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
        except EOFError:
            process.join()
            raise ProcessError(
                f"Expected the process to answer. Found that it {_ended(process.exitcode)}. What to do: see what it "
                "wrote; a process that the system kills (signal 9) mostly lacks memory."
            ) from None
        if kind == "returned":
            return value
        if kind == "raised":
            raise value
        on_message(value)
    raise ProcessError(
        f"Expected an answer within {seconds:g} s. Found none: the process was ended. What to do: look for what hangs "
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
    os.environ.clear()  # they are those of the time at which the first process was forked
    os.environ.update(environ)
    os.chdir(folder)
    os.dup2(2, 1)  # standard output is for results
    try:
        found = ("returned", function(lambda message: connection.send(("message", message)), *arguments))
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
