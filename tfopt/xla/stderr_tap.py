"""XLA's lines, taken out of what this process writes to its standard error."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tfopt.errors import UnsupportedError
from tfopt.xla import forwarder

_PATIENCE_SECONDS = 5.0
# Forwarders that processes forked while watching still write to: kept, so that Python does not call them forgotten.
_left: list["subprocess.Popen[bytes]"] = []


class StderrTap:
    """Lays standard error through a forwarder (tfopt/xla/forwarder.py) while it is on.

    TensorFlow writes its log to file descriptor 2 and nowhere else. The forwarder puts XLA's lines into a file without
    a name, from which `lines` reads them: a file takes any amount, so that nothing ever waits for this process.

    Args:
        hidden: As for `tfopt.xla.forwarder.Forwarder`.
        copy: As there.

    Raises:
        tfopt.errors.UnsupportedError: There is no standard error, or no process or temporary file is to be had.
    """

    def __init__(self, *, hidden: str, copy: bool):
        if getattr(sys, "frozen", False) or not sys.executable:
            raise _unsupported("a Python interpreter to start", f"sys.executable={sys.executable!r}")
        with ExitStack() as files:
            with _expecting("an open standard error"):
                self._stderr = os.dup(2)
            files.callback(os.close, self._stderr)
            with _expecting("a temporary file"):
                self._file = files.enter_context(tempfile.TemporaryFile(buffering=0))
            with _expecting("to start a process"):
                source, self._pipe = os.pipe()
                files.callback(os.close, self._pipe)
                try:
                    self._process = self._start(source, hidden, copy)
                finally:
                    os.close(source)
            self._files = files.pop_all()
        self._read = self._marks = 0

    def on(self) -> None:
        """From now on standard error passes the forwarder."""
        os.dup2(self._pipe, 2)

    def off(self) -> None:
        """From now on it goes where it went before."""
        os.dup2(self._stderr, 2)

    def lines(self) -> list[str]:
        """XLA's lines that were written since the last call, all of them; it waits for the forwarder."""
        self._marks += 1
        mark = b"\0%d\0\n" % self._marks
        try:
            os.write(self._pipe, mark[:-1])
        except BrokenPipeError:
            return self._new()
        lines: list[str] = []
        end = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            lines += self._new()
            if lines and lines[-1] == mark.decode().rstrip("\n"):
                return lines[:-1]
            time.sleep(0.0005)
        return lines

    def abandon(self) -> None:
        """Leaves it to the process that this one was forked from."""
        self.off()
        self._files.close()

    def close(self) -> None:
        """Ends it: standard error is as before."""
        self.abandon()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            _left.append(self._process)

    def _start(self, source: int, hidden: str, copy: bool) -> "subprocess.Popen[bytes]":
        file = self._file.fileno()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", forwarder.__file__, str(file), hidden, str(int(copy))],
            stdin=source,
            stdout=self._stderr,
            stderr=subprocess.DEVNULL,
            pass_fds=[file],
            start_new_session=True,  # Ctrl-C is for the watched process; this one ends after it
        )

    def _new(self) -> list[str]:
        """The whole lines that are new in the file."""
        size = os.fstat(self._file.fileno()).st_size - self._read
        data = os.pread(self._file.fileno(), size, self._read)
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").split("\n")[:-1]


@contextmanager
def _expecting(expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unsupported(expected, str(error)) from error


def _unsupported(expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"Expected {expected}. Found: {found}. Go by tfopt.xla.watch()'s signatures, or watch elsewhere."
    )
