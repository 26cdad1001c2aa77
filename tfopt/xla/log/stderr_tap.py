"""Takes XLA's lines out of what this process writes to standard error."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tfopt.errors import UnsupportedError
from tfopt.xla.log import forwarder

PATIENCE_SECONDS = 5.0
_END_SECONDS = 0.03  # a process that was started meanwhile may keep it for ever
_PIPE_BYTES = 2**20  # so that a busy forwarder slows no step; the most that Linux gives a user


class StderrTap:
    """Routes standard error through a forwarder process (forwarder.py) while it is on.

    TensorFlow logs only to file descriptor 2. The forwarder collects XLA's lines in an anonymous file for `lines` to
    read; unlike a pipe, it never fills up. A forwarder that somebody stops is continued at once, or whoever writes
    would wait. Arguments are those of `Forwarder`.

    Raises:
        tfopt.errors.UnsupportedError: If standard error is closed, or no process or temporary file can be created.
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
                with suppress(OSError):
                    fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                try:
                    self._process = self._start(source, hidden, copy)
                finally:
                    os.close(source)
            self._files = files.pop_all()
        self._read = self._marks = 0
        self._awaited = ""  # the mark that the forwarder has not passed on yet
        with suppress(RuntimeError):  # no more threads: all else works
            threading.Thread(target=_keep, args=(self._process,), name="tfopt-forwarder", daemon=True).start()

    def on(self) -> None:
        """Routes standard error through the forwarder."""
        os.dup2(self._pipe, 2)

    def off(self) -> None:
        """Routes standard error to where it went before."""
        os.dup2(self._stderr, 2)

    def has_lines(self) -> bool:
        """Whether lines have arrived that nobody has read; others may be on their way."""
        # The forwarder shares the position. Unlike fstat, this takes no microseconds.
        return os.lseek(self._file.fileno(), 0, os.SEEK_CUR) > self._read

    def lines(self, patience_seconds: float = PATIENCE_SECONDS) -> list[str]:
        """Waits for the forwarder to catch up, and returns XLA's lines since the last call."""
        if not self._awaited:
            self._marks += 1
            self._awaited = f"\0{self._marks}\0"
            try:
                os.write(self._pipe, self._awaited.encode())
            except BrokenPipeError:
                self._awaited = ""
                return self._new()
        else:  # it was late, as when nobody reads standard error: waiting again would not help
            return self._until_mark(self._new())
        lines: list[str] = []
        end = time.monotonic() + patience_seconds
        while time.monotonic() < end:
            lines += self._until_mark(self._new())
            if not self._awaited:
                return lines
            time.sleep(0.0005)
        return lines

    def _until_mark(self, lines: list[str]) -> list[str]:
        """The lines without the mark, which ends them."""
        if self._awaited in lines:
            lines.remove(self._awaited)
            self._awaited = ""
        return lines

    def abandon(self) -> None:
        """Releases the tap in a forked child; the parent keeps using it."""
        self.off()
        self._files.close()

    def close(self) -> None:
        """Restores standard error and ends the forwarder."""
        self.abandon()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _start(self, source: int, hidden: str, copy: bool) -> "subprocess.Popen[bytes]":
        file = self._file.fileno()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", forwarder.__file__, str(file), hidden, str(int(copy))],
            stdin=source,
            stdout=self._stderr,
            stderr=subprocess.DEVNULL,
            pass_fds=[file],
            start_new_session=True,  # Ctrl-C is meant for the watched process, which the forwarder outlives
        )

    def _new(self) -> list[str]:
        """New whole lines in the file."""
        size = os.fstat(self._file.fileno()).st_size - self._read
        data = os.pread(self._file.fileno(), size, self._read)
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").split("\n")[:-1]


def _keep(process: "subprocess.Popen[bytes]") -> None:
    """Continues a process whenever somebody has stopped it, and takes its exit status once it ends."""
    changes = os.WSTOPPED | os.WEXITED | os.WNOWAIT
    with suppress(OSError):
        while (found := os.waitid(os.P_PID, process.pid, changes)) and found.si_code == os.CLD_STOPPED:
            process.send_signal(signal.SIGCONT)
    process.wait()


@contextmanager
def _expecting(expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unsupported(expected, str(error)) from error


def _unsupported(expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"Expected {expected}. Found: {found}. "
        "Use the signatures that tfopt.xla.watch() counts instead, or watch in another environment."
    )
