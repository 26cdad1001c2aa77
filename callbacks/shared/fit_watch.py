"""Ends what callbacks have opened when a training is over although nobody says so, or when SIGTERM ends the process.

One thread per process waits for SIGTERM, and ends with the last running training.
"""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tfopt.warn import warn_once

_EVERY_SECONDS = 1.0  # a look at who handles SIGTERM
# Slurm kills 30 s after SIGTERM by default, Kubernetes too, tfopt's launcher 10 s.
_FLUSH_SECONDS = 5.0


class _Watch:
    """The thread, and the handler of SIGTERM."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: garbage collection may end a fit in a thread that holds it
        self._terminating = threading.Lock()
        self._ends: set[weakref.finalize[..., object]] = set()
        self._thread: threading.Thread | None = None
        # Python's handlers run in the main thread between bytecodes, so not during a step that hangs. A signal's number
        # is written to this socket at once, and the thread reads it.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handles = False
        self._handles_alone = False

    def add(self, owner: object, end: Callable[[], object], *, at_exit: bool) -> Callable[[], object]:
        """Calls `end` once the owner is collected; returns what calls it earlier."""
        ending = weakref.finalize(owner, self._end, end)
        ending.atexit = at_exit
        with self._lock:
            self._ends.add(ending)
            if self._thread is None:
                self._drain()
                thread = threading.Thread(target=self._run, name="tfopt-fit-watch", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: SIGTERM ends the process at once
                    return ending
                self._thread = thread
                self._handles_alone = True
            self._handle_sigterm()
        return ending

    def _end(self, end: Callable[[], object]) -> None:
        try:
            end()
        except Exception as error:  # noqa: BLE001  the others must end, too, and the fit's own error be raised
            warn_once(f"end {type(error).__name__}", f"A callback failed to end: {error!r}", error=error)
        finally:  # also after a second Ctrl-C
            with self._lock:
                self._ends = {ending for ending in self._ends if ending.alive}
                if not self._ends:
                    self._release_sigterm()
                    with contextlib.suppress(BlockingIOError):
                        self._writer.send(b"\0")  # the thread ends

    def forget(self) -> None:
        """Leaves everything to the parent process, after a fork."""
        handles = self._handles
        self.__init__()  # type: ignore[misc]
        if handles:
            if signal.getsignal(signal.SIGTERM) is _on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)  # what the child gets would be read by the parent

    def _run(self) -> None:
        while True:
            try:
                received = self._reader.recv(4096)
            except TimeoutError:
                received = b""
            if self._handles and signal.getsignal(signal.SIGTERM) is not _on_sigterm:
                self._handles_alone = False
            if signal.SIGTERM in received and self.handles_alone():
                self.terminate()
            with self._lock:
                if not self._ends:
                    self._thread = None
                    return

    def _drain(self) -> None:
        """Drops what arrived while no thread read."""
        self._reader.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        self._reader.settimeout(_EVERY_SECONDS)

    def handles_alone(self) -> bool:
        """Whether SIGTERM is the thread's: it runs, and no other handler has been there since."""
        ours = signal.getsignal(signal.SIGTERM) is _on_sigterm
        return ours and self._handles_alone and self._thread is not None

    def share(self) -> None:
        """Leaves SIGTERM to whatever handler is installed."""
        self._handles_alone = False

    def terminate(self) -> None:
        """Ends all fits, within a few seconds, and then this process as SIGTERM does by default."""
        if not self._terminating.acquire(blocking=False):
            return
        until = time.monotonic() + _FLUSH_SECONDS
        threads = [threading.Thread(target=end, daemon=True) for end in list(self._ends) if end.atexit]
        with contextlib.suppress(RuntimeError):  # no more threads
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
        # Python changes handlers only in the main thread, which may hang in a step.
        set_handler = ctypes.CDLL(None).signal
        set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        set_handler(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
        os._exit(128 + signal.SIGTERM)

    def _handle_sigterm(self) -> None:
        """Takes SIGTERM if nobody else has it."""
        if threading.current_thread() is not threading.main_thread() or os.name != "posix":
            return
        if self._handles and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or not _is_default(signal.SIGTERM):
            return
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before not in (-1, self._writer.fileno()):  # asyncio's
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGTERM, _on_sigterm)
        self._handles = True

    def _release_sigterm(self) -> None:
        """Restores the default action. In other threads than the main one, it stays until the next fit ends."""
        if not self._handles or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        found = signal.set_wakeup_fd(-1)
        if found != self._writer.fileno():
            signal.set_wakeup_fd(found)
        self._handles = False


def end_with(owner: object, end: Callable[[], object], *, at_exit: bool) -> Callable[[], object]:
    """Calls `end` once: as soon as `owner` is collected, or SIGTERM or Python's exit ends the process.

    Args:
        owner: Lives as long as the training, or longer.
        end: Must not hold the owner. Called in any thread.
        at_exit: Whether to call it when the process ends.

    Returns:
        What calls `end` earlier. Later calls do nothing.
    """
    return _WATCH.add(owner, end, at_exit=at_exit)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if not _WATCH.handles_alone():
        _WATCH.terminate()


def is_own_handler(handler: object) -> bool:
    """Whether a handler of SIGTERM is the one that ends all fits here."""
    return handler is _on_sigterm


def share_sigterm() -> None:
    """Says that another handler of SIGTERM is installed, perhaps for a moment: the thread must not act on its own."""
    _WATCH.share()


def _is_default(number: int) -> bool:
    """Whether the system knows no handler of a signal either: Python does not see those that C code sets."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigIgn:"))]
    except (OSError, ValueError, IndexError):
        return True  # not Linux
    return not any(mask >> (number - 1) & 1 for mask in masks)


_WATCH = _Watch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCH.forget)
