"""Runs a training script in a child process, and diagnoses a training of it instead of running that."""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import tfopt
from tfopt.bench.doctor_hook import ANSWER, DIAGNOSE, PAGE, TIME, TUNE, Task
from tfopt.errors import TfoptError, UnsupportedError
from tfopt.text import figure, wrapped

# Python imports a module of this name before it runs the script: what `install` hides, the script does not see.
_SITECUSTOMIZE = """\
import sys
sys.path.remove({folder!r})
sys.path.insert(0, {root!r})
from tfopt.bench import doctor_hook
sys.path.remove({root!r})
doctor_hook.install({folder!r}, {restored!r}, {alive!r}, **{options!r})
del sys.modules["sitecustomize"]
import sitecustomize  # the one that this one hid, if any
"""
_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
_TERMINATE_SECONDS, _KILL_SECONDS = 5.0, 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


class ScriptError(TfoptError):
    """The script failed before a training of it was diagnosed."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found."""

    text: str
    found: dict[str, Any]
    """JSON: the diagnosis; with `apply`, also the tuning and the runs of the script."""
    page: str | None
    """The HTML page, if it was asked for."""


def require_script(script: str | None, *, page: bool) -> None:
    """Checks before anything is run that the script, unless it is None, is there, and that a page can be made.

    Raises:
        ValueError: If there is no such script.
        tfopt.errors.UnsupportedError: If jinja2, which a page needs, is not installed.
    """
    if script is not None and not Path(script).is_file():
        found = f"{script!r} is a folder" if Path(script).is_dir() else f"no file {script!r}"
        raise ValueError(f"Expected a Python script. Found: {found}. Check its path; a module needs -m.")
    if page and importlib.util.find_spec("jinja2") is None:
        raise UnsupportedError(
            "Expected jinja2, which renders the page. Found: it is not installed. Run: pip install jinja2"
        )


def examine(
    command: Sequence[str],
    *,
    fit: int = 1,
    steps: int = 50,
    page: bool = False,
    apply: bool = False,
    output: int | None = None,
) -> Examined:
    """Runs a script as `python` would, and diagnoses a call of `Model.fit` instead of running it.

    The script ends with that call. Everything it has started has ended, too, when this returns or raises.

    Args:
        command: The script, or "-m" and a module, and its arguments.
        fit: Which call, from 1. Earlier ones train as usual.
        steps: Steps of each experiment.
        page: Whether to make an HTML page, too.
        apply: Whether to run the script twice more, up to so many steps of that call: as it is, and with what
            `tfopt.tune` changes.
        output: A file descriptor for what the script writes to standard output; by default that of this process.

    Raises:
        tfopt.errors.UnsupportedError: If the script ends with exit code 0 without that call, or the training is one
            that cannot be diagnosed.
        ScriptError: If it ends otherwise without that call, or the diagnosis fails.
    """
    task = Task(kind=TUNE if apply else DIAGNOSE, fit=fit, steps=steps, page=page)
    answer, html = _answer(command, task, output)
    if not apply:
        return Examined(answer["text"], answer["diagnosis"], html)
    tuning = answer["tuning"]
    found = {"diagnosis": answer["diagnosis"], "tuning": tuning, "runs": None}
    texts = [answer["text"], wrapped(tuning.pop("text"))]
    if causes := tuple(tuning["applied"]):
        timing = replace(task, kind=TIME, page=False)
        runs = [_answer(command, replace(timing, causes=each), output)[0]["timed"] for each in ((), causes)]
        found["runs"] = dict(zip(("as it is", "tuned"), runs, strict=True))
        texts.append(wrapped(_runs(*runs)))
    return Examined("\n\n".join(texts), found, html)


def _answer(command: Sequence[str], task: Task, output: int | None) -> tuple[dict[str, Any], str | None]:
    """Runs the script with the hook; returns what the hook found, and its page if there is one."""
    with tempfile.TemporaryDirectory(prefix="tfopt-doctor-") as folder:
        code = _run(command, folder, task, output)
        answer: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):  # a script that was killed leaves none
            answer = json.loads(Path(folder, ANSWER).read_text(encoding="utf-8"))
        if "diagnosis" in answer or "timed" in answer:
            return answer, Path(folder, PAGE).read_text(encoding="utf-8") if task.page else None
    script = " ".join(command[: 2 if command[0] == "-m" else 1])
    if "refused" in answer:
        raise UnsupportedError(answer["refused"])
    if "failed" in answer:
        raise ScriptError(
            f"Expected to diagnose the training of {script}. Found {answer['failed'].rstrip('.')}. Run the script as "
            "it is, to see whether its training fails, too."
        )
    raise _without_fit(script, code, task.fit, answer.get("calls", _UNKNOWN))


def _runs(plain: dict[str, Any], tuned: dict[str, Any]) -> str:
    """What the script gained, in sentences."""
    from tfopt.measure.times import StepTimes, compare

    times = [StepTimes.from_dict(run["times"]) for run in (plain, tuned)]
    before, after = (figure(each.median_ms) for each in times)
    said = (
        f"The script itself, run twice up to step {plain['steps']}: {before} ms a step as it is, {after} ms tuned, "
        f"{compare(*times)}."
    )
    losses = [run["loss"] for run in (plain, tuned)]
    if None in losses:
        return said
    return f"{said} Its loss there: {losses[0]:.4g} as it is, {losses[1]:.4g} tuned."


def _environ(folder: str, task: Task, alive: int) -> dict[str, str]:
    """The environment in which Python finds the hook, which restores it. Nothing is written beside the script."""
    path = os.environ.get("PYTHONPATH")
    changed = {
        "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else folder,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    restored = {name: os.environ.get(name) for name in changed}
    root = str(Path(tfopt.__file__).parents[1])
    code = _SITECUSTOMIZE.format(folder=folder, root=root, restored=restored, alive=alive, options=asdict(task))
    Path(folder, "sitecustomize.py").write_text(code, encoding="utf-8")
    return os.environ | changed


# Of a script that was killed, or left by os._exit.
_UNKNOWN = {"import": 1}


def _without_fit(script: str, code: int, fit: int, calls: dict[str, int]) -> TfoptError:
    """The error for a script that has ended without the call."""
    expected = f"Expected {script} to call Model.fit" + (f" {fit} times" if fit > 1 else "")
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    called = calls.get("fit", 0)
    if called >= fit:
        return ScriptError(
            f"Expected to time the training of {script}. Found that it {ended} meanwhile. Run it as it is."
        )
    if code:
        return ScriptError(f"{expected}. Found that it {ended} before that. Run it as it is, and correct that first.")
    if called:
        return UnsupportedError(f"{expected}. Found {called}. Pass a smaller --fit.")
    return UnsupportedError(
        f"{expected}. Found that it {ended} without doing so{_seen(calls)}. Only Model.fit can be examined, in the "
        "script's own process. If the script has a loop of its own, move it into Model.train_step; if it launches "
        "another, pass that one."
    )


def _seen(calls: dict[str, int]) -> str:
    if batches := calls.get("train_on_batch"):
        return f"; it called train_on_batch {batches} times"
    if calls.get("GradientTape"):
        return "; it trained with tf.GradientTape in a loop of its own"
    return "" if calls.get("import") else "; it did not even import Keras"


def _run(command: Sequence[str], folder: str, task: Task, output: int | None) -> int:
    """Runs Python to its end and returns its exit code. What it has started ends with it."""
    if sys.platform == "linux":  # processes that outlive their parent become children of this one, so they are found
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    others = _descendants()
    alive, end = os.pipe()  # closed by the system if this process is killed
    # In the group of this process: Ctrl-C reaches it as well, and it may read the terminal.
    process = subprocess.Popen(
        [sys.executable, *command], env=_environ(folder, task, alive), stdout=output, pass_fds=[alive]
    )
    os.close(alive)
    try:
        return process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        _end(others)
        os.close(end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _end(others: set[psutil.Process]) -> None:
    """Ends what this process has started, also what outlived its own parent, but for others."""
    for number, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        due, signalled = time.monotonic() + seconds, set[psutil.Process]()
        while (running := _descendants() - others) and time.monotonic() < due:
            for child in running - signalled:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)
            signalled |= running
            psutil.wait_procs(running, 0.02)  # takes the exit status of those that nobody else waits for


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
