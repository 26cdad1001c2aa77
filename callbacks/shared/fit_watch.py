"""Notices that a training is over although nobody says so: Ctrl-C in a notebook, which keeps the exception, or SIGTERM.

One thread per process watches all running fits and ends with the last of them.
"""

import atexit
import contextlib
import ctypes
import gc
import inspect
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from tfopt.warn import warn_once

_EVERY_SECONDS = 1.0
# Slurm kills 30 s after SIGTERM by default, Kubernetes too, tfopt's launcher 10 s.
_FLUSH_SECONDS = 5.0


class Loop:
    """The call that drives a training: Keras' `fit`, or a loop of the user's own."""

    def __init__(self, frame: FrameType):
        # Not the frame itself, which would keep alive all that fit has made.
        self._frame, self._code = id(frame), frame.f_code
        self._thread = threading.get_ident()
        module = str(frame.f_globals.get("__name__"))
        self._of_keras = frame.f_code.co_name == "fit" and module.startswith("keras.")
        self._visible = not _switches_stacks()

    def is_over(self, stacks: Mapping[int, FrameType]) -> bool:
        """Whether it has surely ended, given the innermost frame of each running thread."""
        stack = list(_outwards(stacks.get(self._thread)))
        if not self._visible or any(map(self._is, stack)) or (stack and _suspended(stack[-1])):
            return False
        # A loop of the user's own may be a suspended generator, or go on in another function or notebook cell than the
        # one that called on_train_begin. It is over once an exception that nobody caught went through it.
        return self._of_keras or any(map(self._is, _frames_of_last_error()))

    def _is(self, frame: FrameType) -> bool:
        return id(frame) == self._frame and frame.f_code is self._code


class _Fit:
    """What has to be done at a training's end."""

    def __init__(self, loop: Loop | None, end: Callable[[], object]):
        self.loop, self._end = loop, end

    def __call__(self) -> None:
        try:
            self._end()
        finally:
            _WATCH.remove(self)


class _Watch:
    """The thread, and the handler of SIGTERM."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: garbage collection may end a fit in a thread that holds it
        self._ending = threading.Lock()
        self._terminating = threading.Lock()
        self._fits: dict[_Fit, weakref.finalize[..., object]] = {}
        self._thread: threading.Thread | None = None
        # Python's handlers run in the main thread between bytecodes, so not during a step that hangs. A signal's number
        # is written to this socket at once, and the thread reads it.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handles = False
        self._handles_alone = False

    def add(self, owner: object, fit: _Fit, *, at_exit: bool) -> None:
        """Calls `fit` once the owner is collected or the fit is over."""
        with self._lock:
            finalizer = self._fits[fit] = weakref.finalize(owner, fit)
            finalizer.atexit = at_exit
            if self._thread is None:
                self._drain()
                thread = threading.Thread(target=self._run, name="tfopt-fit-watch", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: the owner's collection remains
                    return
                self._thread = thread
                self._handles_alone = True
            self._handle_sigterm()

    def remove(self, fit: _Fit) -> None:
        """Forgets a fit that was ended."""
        with self._lock:
            self._fits.pop(fit, None)
            if not self._fits:
                self._release_sigterm()

    def finish(self) -> None:
        """Waits for what the thread is ending, when Python exits."""
        self._ending.acquire(timeout=_FLUSH_SECONDS)

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
            received = self._receive()
            if self._handles and signal.getsignal(signal.SIGTERM) is not _on_sigterm:
                self._handles_alone = False
            if signal.SIGTERM in received and self.handles_alone():
                self.terminate()
            with self._lock:
                if not self._fits:
                    self._thread = None
                    return
                fits = dict(self._fits)
            for fit in _over(fits):
                with self._ending:
                    try:
                        fits[fit]()
                    except Exception as error:  # noqa: BLE001  the others must end, too
                        warn_once(f"end {type(error).__name__}", f"A callback failed to end: {error!r}", error=error)

    def _receive(self) -> bytes:
        """The numbers of signals that arrived within the last second or now."""
        try:
            return self._reader.recv(4096)
        except TimeoutError:
            return b""

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
        threads = [threading.Thread(target=end, daemon=True) for end in list(self._fits.values()) if end.atexit]
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


def end_with(owner: object, loop: Loop | None, end: Callable[[], object], *, at_exit: bool) -> None:
    """Calls `end` once, as soon as `owner` is collected, `loop` is over, or SIGTERM or Python's exit ends the process.

    Args:
        owner: Lives as long as the training, or longer.
        loop: What drives the training, if known.
        end: Must not hold the owner. Called in any thread.
        at_exit: Whether to call it when the process ends.
    """
    _WATCH.add(owner, _Fit(loop, end), at_exit=at_exit)


def thread_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each running thread."""
    if sys.version_info >= (3, 12):
        return sys._current_frames()
    # Here Python makes the frames under a lock, and what the garbage collector frees meanwhile may need the same one:
    # then all threads stand still for ever (CPython's issue 106883).
    with _COLLECTING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if not _WATCH.handles_alone():
        _WATCH.terminate()


def is_own_handler(handler: object) -> bool:
    """Whether a handler of SIGTERM is the one that ends all fits here."""
    return handler is _on_sigterm


def share_sigterm() -> None:
    """Says that another handler of SIGTERM is installed, perhaps for a moment: the thread must not act on its own."""
    _WATCH.share()


def _over(fits: Mapping[_Fit, object]) -> list[_Fit]:
    stacks = thread_frames()
    del stacks[threading.get_ident()]  # a frame that its own variable holds would be a reference cycle
    return [fit for fit in fits if fit.loop is not None and fit.loop.is_over(stacks)]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _suspended(outermost: FrameType) -> bool:
    """Whether a stack breaks off at a generator: its thread ran on while the stack was walked, and left it."""
    return bool(outermost.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def _frames_of_last_error() -> Iterator[FrameType]:
    """The frames of the exception that a notebook keeps for its debugger."""
    error = getattr(sys, "last_value", None)
    seen = set()
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        entry = error.__traceback__
        while entry is not None:
            yield entry.tb_frame
            entry = entry.tb_next
        error = error.__cause__ or error.__context__


def _switches_stacks() -> bool:
    """Whether greenlets may take this thread's frames from its stack while they wait."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return False
    return greenlet.getcurrent().parent is not None or bool({"gevent", "eventlet"} & sys.modules.keys())


def _is_default(number: int) -> bool:
    """Whether the system knows no handler of a signal either: Python does not see those that C code sets."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigIgn:"))]
    except (OSError, ValueError, IndexError):
        return True  # not Linux
    return not any(mask >> (number - 1) & 1 for mask in masks)


_WATCH = _Watch()
atexit.register(_WATCH.finish)
_COLLECTING = threading.Lock()  # for who switches the garbage collector off
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCH.forget)
    os.register_at_fork(before=_COLLECTING.acquire, after_in_parent=_COLLECTING.release)
    os.register_at_fork(after_in_child=_COLLECTING.release)
