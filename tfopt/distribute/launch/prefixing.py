"""Merges the output of several processes, prefixing each line with its origin."""

import os
import select
import time
from collections.abc import Callable

_LINE_BYTES = 65536  # longer lines are cut into pieces
_REDRAW_SECONDS = 5.0


class Prefixer:
    """Splits a stream of bytes into lines and prefixes each.

    Of a line that a progress bar redraws with carriage returns, only the last state is kept; until the line ends, its
    current state is shown every few seconds.

    Args:
        prefix: What each line starts with.
        clock: A monotonic clock, in seconds.

    Example:
        >>> Prefixer(b"[0] ").lines(b"one\\ntwo\\nthr")
        b'[0] one\\n[0] two\\n'
    """

    def __init__(self, prefix: bytes, *, clock: Callable[[], float] = time.monotonic):
        self._prefix = prefix
        self._clock = clock
        self._rest = b""
        self._drawn_at = clock()

    def lines(self, data: bytes) -> bytes:
        """Returns the lines that `data` completes, prefixed. An incomplete line is kept for the next call."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        out = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole]
        if b"\r" in self._rest:
            drawn, _, self._rest = self._rest.rpartition(b"\r")
            state = drawn.rstrip(b"\r").rpartition(b"\r")[2]
            if state and self._clock() - self._drawn_at >= _REDRAW_SECONDS:
                self._drawn_at = self._clock()
                out.append(state)
            if state and not self._rest:  # it stays until drawn over, and may be the last state
                self._rest = state + b"\r"
        while len(self._rest) >= _LINE_BYTES:
            out.append(self._rest[:_LINE_BYTES])
            self._rest = self._rest[_LINE_BYTES:]
        return b"".join(self._prefix + line + b"\n" for line in out)

    def end(self) -> bytes:
        """Returns what is left at the end of the stream as a line."""
        return self.lines(b"\n") if self._rest else b""


def write_whole(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, in pieces if need be; raises OSError if nobody reads it or the disk is full."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program made the terminal non-blocking
            select.select([], [descriptor], [], 1.0)
