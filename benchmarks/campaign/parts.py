"""The parts of a step: each a process of its own, with a limit, whose output is recorded line by line."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from campaign.lines import parsed
from tfopt.processes import exit_code, limit, signal_group

_LEAST_SECONDS = 5.0  # less time is not worth starting a part for
_TAIL_CHARACTERS = 1500
# Or a part would keep the GPU after a kill -9. As preexec_fn it failed now and then in a process with threads.
_WITH_PARENT = """
import os, sys
from tfopt.processes import die_with
die_with(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command to run until it is done, which it is when it has ended with code 0."""

    name: str
    command: tuple[str, ...]
    """What follows `python`."""
    limit_seconds: float
    read: Callable[[str], dict[str, Any] | None] = parsed
    """Makes a record of a line of output; None for a line that only goes to the log."""
    done: Callable[[list[dict]], bool] | None = None
    """Decides from the part's records whether it is done, where code 0 is not enough."""
    again: bool = False
    """Whether to run it even if it is done."""
    figures: Callable[[list[dict]], str] | None = None
    """Says in a few words what the part found. By default the last record."""

    def is_done(self, records):
        """Whether there is nothing left to run."""
        own = [record for record in records if record.get("part") == self.name]
        if self.done is not None:
            return self.done(own)
        ends = [record["ended"] for record in own if "ended" in record]
        return bool(ends) and ends[-1] == "done"

    def summary(self, records):
        """How the part stands, on one line."""
        own = [record for record in records if record.get("part") == self.name]
        if not own:
            return f"{self.name}: not run"
        last, found = own[-1], self._found(own)
        if "ended" not in last:
            return f"{self.name}: interrupted; {found}"
        cause = (
            f" ({last['tail'].strip().splitlines()[-1]})" if last["ended"] == "failed" and last["tail"].strip() else ""
        )
        return f"{self.name}: {last['ended']}, {last['seconds']:.0f} s{cause}; {found}"

    def _found(self, own):
        results = last_run(own)
        found = self.figures(own) if self.figures else words(results[-1]) if results else ""
        return found or "no figures"


def last_run(own):
    """What a part's last run has recorded, without its beginning and its end."""
    begun = max((at for at, record in enumerate(own) if "begun" in record), default=-1)
    return [record for record in own[begun + 1 :] if "ended" not in record]


def words(record):
    """A record's own figures on a line."""
    return ", ".join(f"{name}={value}" for name, value in record.items() if name not in ("part", "at"))


def run(parts, lines, logs, *, deadline, environ, at_once=1, clock=time.monotonic):
    """Runs the parts that are not done, begun in order, until the deadline.

    Args:
        parts: In order.
        lines: Gets a record for each line of output that has one, and one for each end.
        logs: Path of a folder; a file there, named for the part, gets all its output.
        deadline: By the clock. A part that it cuts short is run again the next time.
        environ: Environment of the processes.
        at_once: How many parts run at a time.
        clock: Seconds, monotonic.

    Returns:
        Whether every part is done.
    """
    waiting = deque(part for part in parts if part.again or not part.is_done(lines.read()))

    def work():
        while True:
            try:
                part = waiting.popleft()
            except IndexError:
                return
            _run(part, lines, logs, deadline, environ, clock)

    # Daemons, so that an interrupt ends the campaign, and its parts with it.
    workers = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return all(part.is_done(lines.read()) for part in parts)


def _run(part, lines, logs, deadline, environ, clock):
    """Runs one part and records how it ended."""
    left = deadline - clock()
    if left < _LEAST_SECONDS:
        print(f"No time is left for {part.name}.", flush=True)
        return
    log = logs / (re.sub(r"[^\w.]+", "-", part.name) + ".txt")
    seconds = min(part.limit_seconds, left)
    print(f"{part.name}: at most {seconds:.0f} s", flush=True)
    begin, started = _size(log), clock()
    lines.append(part=part.name, begun=True)
    code, late = _output(part, lines, log, seconds, environ)
    ended = "done" if code == 0 else "cut short" if late and seconds < part.limit_seconds else "failed"
    tail = "" if code == 0 else _read_from(log, begin)[-_TAIL_CHARACTERS:]
    if late:
        tail += f"\nkilled after {seconds:.0f} s"
    lines.append(part=part.name, ended=ended, code=code, seconds=round(clock() - started, 1), tail=tail)


def _output(part, lines, log, seconds, environ):
    """Records a part's output; returns its exit code, and whether it was killed at its limit."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *part.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environ,
            start_new_session=True,
        )
        try:
            with limit(process, seconds) as late:
                for line in process.stdout:
                    output.write(line)
                    if record := part.read(line.decode(errors="replace").rstrip()):
                        lines.append(part=part.name, **record)
                return exit_code(process), late.is_set()
        finally:
            signal_group(process, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _size(path):
    return path.stat().st_size if path.exists() else 0


def _read_from(path, begin):
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
