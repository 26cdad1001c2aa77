"""Tries whether a patch is needed and works, in a version of Keras that tfopt does not know.

A process of its own trains stock Keras, then patched Keras, once where the defect shows and once where it does not. It
finds neither the GPU nor the settings of the process that asks, but the same code, and is killed with it. Answers are
kept on disk.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from tfopt.files import lock, write_atomic
from tfopt.internals import probe_process
from tfopt.internals.probe import NEEDED, NEEDLESS, UNFIT, Probed, Verdict, key_of, versions
from tfopt.processes import Child, exit_code, limit
from tfopt.warn import warn_once

_SECONDS = 240  # for one probe, on a busy machine
_START_SECONDS = 120  # for the process to load TensorFlow, on a busy machine
_SETTINGS = ("TF_", "XLA_", "KERAS_")
_PROBES = "TFOPT_PROBES"  # in the environment of a process that probes

_known: dict[str, Verdict] = {}  # by key


def kept(patch: Probed) -> Verdict | None:
    """The verdict on a patch if this machine has one. Probes nothing."""
    key = key_of(patch)
    if key not in _known:
        with suppress(OSError, ValueError, TypeError, RuntimeError):  # RuntimeError: a user without a home
            verdict = Verdict(**json.loads(_place(patch, key).read_text(encoding="utf-8")))
            if verdict.state in (NEEDED, NEEDLESS, UNFIT):
                _known[key] = verdict
    return _known.get(key)


def verdicts(patches: Sequence[Probed]) -> list[Verdict]:
    """The verdicts on patches. Those that are not known yet are all probed in one process."""
    asked = [patch for patch in patches if kept(patch) is None]
    if asked:
        with _turn(_START_SECONDS + _SECONDS * len(asked)):
            _probe({patch.name: patch for patch in asked if kept(patch) is None})
    return [_known[key_of(patch)] for patch in patches]


@contextmanager
def _turn(most_seconds: int) -> Iterator[None]:
    """Waits while another process probes, since it keeps its answers; without locks, or after this time, waits no more.

    A probe that needs other patches asks for them in its own process, which waits for nobody.
    """
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError):
            place = Path(folder()).expanduser()
            place.mkdir(parents=True, exist_ok=True)
            ends = time.monotonic() + most_seconds
            while _PROBES not in os.environ and time.monotonic() < ends:
                if (handle := lock(place, os.O_RDONLY | os.O_DIRECTORY)) is not None:
                    stack.callback(os.close, handle)
                    break
                time.sleep(0.1)
        yield


def _probe(asked: dict[str, Probed]) -> None:
    otherwise = "its probe did not end"
    try:
        if asked:
            _ask(list(asked.values()), lambda name, verdict: _keep(asked.pop(name), verdict))
    except OSError as error:  # ChildProcessError, or there is no process to be had
        otherwise = f"the process that tries it failed: {error}"
    for patch in asked.values():  # it may have been this machine
        _keep(patch, Verdict(UNFIT, f"{otherwise} (the next process tries again)", lasts=False))


def _keep(patch: Probed, verdict: Verdict) -> None:
    key = key_of(patch)
    _known[key] = verdict
    if not verdict.lasts:
        return
    try:
        write_atomic(_place(patch, key), json.dumps(asdict(verdict)))
    except (OSError, RuntimeError) as error:
        warn_once(
            "probes_not_kept",
            f"Expected a folder that can be written at {folder()}, to keep what was found out about this Keras. Found: "
            f"{error}. Until XDG_CACHE_HOME names one, each process tries it again.",
        )


def folder() -> str:
    """Where verdicts are kept, as messages name it: "~" is the user's home, if there is one."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tfopt", "probes")


def _place(patch: Probed, key: str) -> Path:
    return Path(folder()).expanduser() / f"{patch.name}-{key}.json"


def _ask(patches: Sequence[Probed], answer: Callable[[str, Verdict], None]) -> None:
    """Probes patches in a process of their own; calls `answer` with the name of each, when its verdict comes.

    Raises:
        ChildProcessError: If that process fails before it has an answer.
    """
    tensorflow, keras, _ = versions()
    asked = [(patch.probe.home, key_of(patch)) for patch in patches]
    answered = 0
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as files,
        Child(probe_process.main, _environment(files)) as child,
        limit(child.process, _START_SECONDS + _SECONDS * len(patches)),
    ):
        _say(
            f"tfopt does not know all of TensorFlow {tensorflow} and Keras {keras} yet. It tries {len(patches)} of "
            f"its patches there, about ten seconds each, and keeps the answers in {folder()}.\n"
        )
        try:
            with suppress(EOFError, ConnectionError):
                child.connection.send((_SECONDS, asked))
                while True:
                    answer(*child.connection.recv())
                    answered += 1
                    _say(f"\r{answered} of {len(patches)} tried", terminal=True)
        finally:
            _say("\n", terminal=True)
        if (code := exit_code(child.process)) and not answered:
            raise ChildProcessError(child.last_words().rpartition("\n")[2] or f"exit code {code}")


def _environment(files: str) -> dict[str, str]:
    """That of the process: without settings of TensorFlow, XLA and Keras, and with a folder for its files."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    # A proxy would be asked for the way to the other worker.
    return environment | {_PROBES: "1", "KERAS_HOME": files, "TMPDIR": files, "no_grpc_proxy": probe_process.HOST}


def _say(text: str, *, terminal: bool = False) -> None:
    """Writes to standard error; with `terminal`, only if that is one."""
    with suppress(AttributeError, OSError, ValueError):  # there may be none, a closed one, or one that does not say
        if not terminal or sys.stderr.isatty():
            sys.stderr.write(text)
