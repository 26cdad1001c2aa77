"""Signals that ask a training to stop, such as SIGTERM before a preemption, acted on after the current step."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from tfopt.errors import unknown_name
from tfopt.warn import warn_once

_SAME_SECONDS = 2.0


class Signals:
    """Records signals between `install` and `remove`.

    A second one ends the process at once, as by default, unless it comes within two seconds: a scheduler and a launcher
    may both forward the same signal.

    Args:
        names: Such as "SIGTERM".
    """

    def __init__(self, names: Iterable[str]):
        self._numbers = [signal.Signals[name] for name in names]
        self._earlier: dict[int, Any] = {}
        self._over, self._process = False, os.getpid()
        self.received: str | None = None
        """Name of the signal received; None if none."""
        self._received_at = 0.0  # seconds, monotonic
        self._exit_code = 0

    def install(self) -> None:
        """Takes over the signals; warns outside the main thread, where Python does not allow it."""
        self.received, self._over, self._process = None, False, os.getpid()
        if not self._numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            warn_once(
                "checkpoint signals",
                f"Expected fit in the main thread, to save a checkpoint on {self._numbers[0].name}. Found it in "
                "another thread, where Python handles no signals. The signal will end the training without a "
                "checkpoint. Call fit in the main thread.",
            )
            return
        for number in self._numbers:
            self._earlier[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Gives the signals back to their earlier handlers; a second call does nothing."""
        self._give_back(lambda earlier: earlier)

    def leave(self, exit_code: int, is_default: Callable[[object], bool]) -> None:
        """Gives the signals back, but for those that would kill: they now end the process at once with this exit code.

        Call it when nothing is left to save. What remains, such as TensorFlow's own end, takes seconds.

        Args:
            exit_code: That this process is about to end with.
            is_default: Whether an earlier handler does as the default one.
        """
        self._exit_code = exit_code
        atexit.register(self._ignore)
        self._give_back(lambda earlier: self._exit if earlier is signal.SIG_DFL or is_default(earlier) else earlier)

    def _give_back(self, replaced: Callable[[Any], Any]) -> None:
        self._over = True
        if threading.current_thread() is not threading.main_thread():
            return  # where Python changes no handlers: from now on each signal is passed on
        for number in self._earlier:
            if signal.getsignal(number) == self._note:
                earlier = self._earlier_of(number)
                signal.signal(number, replaced(signal.SIG_DFL if earlier is None else earlier))
        self._earlier = {}

    def _exit(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._die(number)
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the signal may have interrupted a write
            sys.stdout.flush()
        os._exit(self._exit_code)

    def _ignore(self) -> None:
        """Ignores the signals while Python itself ends, which puts back the default action of all it handles."""
        for number in self._numbers:
            if signal.getsignal(number) == self._exit:
                signal.signal(number, signal.SIG_IGN)

    def earlier_handler(self) -> Callable[..., object] | None:
        """The handler that the received signal had before, if it is a function."""
        if self.received is None:
            return None
        handler = self._earlier_of(signal.Signals[self.received])
        return handler if callable(handler) else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._over or os.getpid() != self._process:  # the latter in a child that was forked meanwhile
            self._pass_on(number, frame)
            return
        now = time.monotonic()
        if self.received is None:
            self._received_at = now
        elif now - self._received_at > _SAME_SECONDS:
            self._die(number)
        self.received = signal.Signals(number).name

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier_of(number)
        if callable(earlier):
            earlier(number, frame)
        elif earlier != signal.SIG_IGN:
            self._die(number)

    def _earlier_of(self, number: int) -> Any:
        """The handler that a signal had before; one that an ended training could not remove is passed over."""
        over, earlier = {self}, self._earlier.get(number, signal.SIG_DFL)
        while isinstance(before := getattr(earlier, "__self__", None), Signals) and (before._over or before in over):
            if before in over:
                return signal.SIG_DFL  # each has found the other's handler
            over.add(before)
            earlier = before._earlier.get(number, signal.SIG_DFL)
        return earlier

    @staticmethod
    def _die(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def checked_signals(names: Any) -> tuple[str, ...]:
    """Returns names of signals; raises TypeError or ValueError for others."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"Expected signals to be a list of names. Received: {names!r}. Pass ('SIGTERM',), or () for none."
        )
    names = tuple(dict.fromkeys(names))
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise unknown_name("signal", name, ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"))
    return names
