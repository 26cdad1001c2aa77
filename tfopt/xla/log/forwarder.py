"""A process between a watched process and its standard error: `forwarder.py FILE HIDDEN COPY`.

It reads what the watched process writes, puts XLA's lines into the file with descriptor FILE, and passes on everything
else immediately and in order. It is a separate process so that output before a crash or kill of the watched one is not
lost. It ends when nobody can write to it any more. It imports no package, so it starts in 20 ms.
"""

import os
import re
import select
import sys

# Abseil's format: severity, date, time, thread, then file:line.
_PREFIX = rb"[IWEF]\d{4} [\d:.]+ +\d+ "
_COMPILER = re.compile(
    _PREFIX + rb"(?:xla_compiler\.cc:\d+\] |device_compiler\.h:\d+\] Compilation of XLA executable"
    rb"|dump_graph\.cc:\d+\] Failed to dump xla_compile_)"
)
_PIECE = re.compile(rb"\0\d+\0|\0\d*|[^\0\n]*\n|[^\0\n]+")
_MARK = re.compile(rb"\0\d+\0")
# A line may arrive in two parts. Only waiting distinguishes such a part from text without a line break.
_PATIENCE_SECONDS = 0.02


class Forwarder:
    """Splits its input: XLA's lines and the marks go to `lines`, the rest to `out`.

    Args:
        lines: Descriptor for XLA's lines and the marks.
        out: Descriptor for everything else.
        hidden: Severities to hide from the user; they are logged only to get the compiler's lines.
        copy: Whether the user sees the compiler's lines too.
    """

    def __init__(self, lines: int, out: int, *, hidden: str, copy: bool):
        self._lines = lines
        self._out = out
        self._copy = copy
        self._hidden = re.compile(b"[" + hidden.encode() + b"]" + _PREFIX.partition(b"]")[2]) if hidden else None
        self._pending = b""

    def feed(self, data: bytes) -> bool:
        """Splits every whole line in `data`; returns whether part of a line is pending."""
        pieces = _PIECE.findall(self._pending + data)
        self._pending = b""
        if pieces and not pieces[-1].endswith(b"\n") and not _MARK.fullmatch(pieces[-1]):
            self._pending = pieces.pop()
        for piece in pieces:
            self._sort(piece)
        return bool(self._pending)

    def flush(self) -> None:
        """Writes the pending part of a line to `out`."""
        pending, self._pending = self._pending, b""
        self._write(self._out, pending)

    def _sort(self, piece: bytes) -> None:
        if _MARK.fullmatch(piece):
            self._write(self._lines, piece + b"\n")
            return
        found = _COMPILER.search(piece)
        if found:  # not always at the start: a progress bar may not have ended its line
            self._write(self._lines, piece[found.start() :])
            piece = piece if self._copy else piece[: found.start()]
        silent = self._hidden and self._hidden.search(piece)
        self._write(self._out, piece[: silent.start()] if silent else piece)

    def _write(self, descriptor: int, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # someone who shares the terminal made it non-blocking
                select.select([], [descriptor], [])
            except OSError:  # the reader is gone; keep reading, or the watched process would block
                return


def main() -> None:
    """Forwards standard input until it ends."""
    lines, hidden, copy = sys.argv[1:]
    forwarder = Forwarder(int(lines), 1, hidden=hidden, copy=copy == "1")
    waiting = False
    while True:
        if waiting and not select.select([0], [], [], _PATIENCE_SECONDS)[0]:
            forwarder.flush()
        data = os.read(0, 65536)
        if not data:
            break
        waiting = forwarder.feed(data)
    forwarder.flush()


if __name__ == "__main__":
    main()
