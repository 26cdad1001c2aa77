"""Tries whether a patch is needed and works, in a version of Keras that tfopt does not know.

A process of its own trains stock Keras, then patched Keras, once where the defect shows and once where it does not. It
finds neither the GPU nor the settings of the process that asks, and is killed with it. Answers are kept on disk.
"""

import hashlib
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from tfopt.errors import TfoptError, summarize_error
from tfopt.files import write_atomic
from tfopt.internals.sources import find, fingerprint
from tfopt.processes import Child, die_with, exit_code, limit
from tfopt.warn import warn_once

NEEDED, NEEDLESS, UNFIT = "needed", "needless", "unfit"
REFUSED = "refused"
"""What a probe measures where tfopt refuses the training."""
_SECONDS = 240  # for one probe, on a busy machine
_AT_ONCE = 4
_START_SECONDS = 120  # for the process to load TensorFlow, on a busy machine
_ROUNDING = 1e-4  # relatively, of sums over replicas
_LONGEST = 1_000  # characters of a reason: what a pipe takes in one piece has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How to see whether a patch is needed and works."""

    home: str
    """Where the patch is, "module:NAME"."""
    harmless: str
    """The function, "module:function", that trains where the defect does not show: numbers that a patch must keep."""
    measure: str = ""
    """The function that shows the defect. Empty for none: a patch that keeps the numbers of `harmless` is needed."""
    right: Any = None
    """What `measure` returns without the defect: a number or a string, or several for the parts of a defect."""
    refuses: bool = False
    """Whether the patch refuses each training that shows the defect, rather than mend it."""
    tolerance: float = 0.0
    """By how much numbers may differ from the right ones. Those of `harmless` stay, on replicas up to rounding."""
    devices: int = 1
    """Logical devices to train on."""
    workers: int = 1
    """Processes that train together. They share the current folder, and compute the same."""
    throughout: str = ""
    """Home of another patch that is in place all the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a probe."""

    state: str
    """NEEDED, NEEDLESS (mended upstream) or UNFIT."""
    why: str
    """What was measured."""


class Probed(Protocol):
    """A patch with a probe."""

    name: str
    probe: Probe

    @property
    def targets(self) -> Iterable[str]:
        """The functions that it replaces or relies on, for `sources.find`."""
        ...

    def tried(self) -> AbstractContextManager[None]:
        """Patches in a block, whatever the version."""
        ...


_known: dict[str, Verdict] = {}  # by key


def kept(patch: Probed) -> Verdict | None:
    """The verdict on a patch if this machine has one. Probes nothing."""
    key = _key(patch)
    if key not in _known:
        with suppress(OSError, ValueError, TypeError, RuntimeError):  # RuntimeError: a user without a home
            _known[key] = Verdict(**json.loads(_place(patch, key).read_text(encoding="utf-8")))
    return _known.get(key)


def verdicts(patches: Sequence[Probed]) -> list[Verdict]:
    """The verdicts on patches. Those that are not known yet are all probed in one process."""
    asked = {patch.name: patch for patch in patches if kept(patch) is None}
    otherwise = "its probe did not end"
    try:
        for name, verdict in _answers(list(asked.values())) if asked else ():
            _keep(asked.pop(name), verdict)
    except ChildProcessError as error:
        otherwise = f"the process that tries it failed: {error}"
    for patch in asked.values():  # not kept on disk: it may have been this machine
        _known[_key(patch)] = Verdict(UNFIT, f"{otherwise} (the next process tries again)")
    return [_known[_key(patch)] for patch in patches]


def _keep(patch: Probed, verdict: Verdict) -> None:
    key = _key(patch)
    _known[key] = verdict
    try:
        write_atomic(_place(patch, key), json.dumps(asdict(verdict)))
    except (OSError, RuntimeError) as error:
        warn_once(
            "probes_not_kept",
            f"Expected a folder that can be written at {folder()}, to keep what was found out about this Keras. Found: "
            f"{error}. Until XDG_CACHE_HOME names one, each process tries it again.",
        )


def _key(patch: Probed) -> str:
    """What a verdict depends on."""
    found = [_fingerprint(target) for target in patch.targets]
    return _hash(json.dumps([sys.version, _versions(), found, _code(), repr(patch.probe)]))


@cache
def _code() -> str:
    """A hash of all of tfopt, of which a patch or a probe may use any part."""
    return _hash("".join(file.read_text(encoding="utf-8") for file in _files()))


def _files() -> Iterator[Path]:
    for package in ("tfopt", "tfopt.callbacks", "tfopt.pipelines"):
        folder = Path(importlib.import_module(package).__path__[0])
        yield from sorted(folder.rglob("*.py"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _versions() -> tuple[str, str, str]:
    # Not those of the installed packages, which have many names: tensorflow-cpu, tf-nightly, keras-nightly.
    import keras
    import numpy as np
    import tensorflow as tf

    return tf.__version__, keras.__version__, np.__version__


def _fingerprint(target: str) -> str:
    try:
        return fingerprint(getattr(*find(target)))
    except (ImportError, AttributeError, OSError, TypeError, SyntaxError) as error:
        return type(error).__name__


def folder() -> str:
    """Where verdicts are kept, as messages name it: "~" is the user's home, if there is one."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tfopt", "probes")


def _place(patch: Probed, key: str) -> Path:
    return Path(folder()).expanduser() / f"{patch.name}-{key}.json"


def _answers(patches: Sequence[Probed]) -> Iterator[tuple[str, Verdict]]:
    """Probes patches in a process of their own; yields what comes of each, by its name.

    Raises:
        ChildProcessError: If that process fails before it has an answer.
    """
    tensorflow, keras, _ = _versions()
    dropped = ("TF_CONFIG", "XLA_FLAGS", "TF_XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    answered = 0
    with Child(main, environment) as child, limit(child.process, _START_SECONDS + _SECONDS * len(patches)):
        try:
            sys.stderr.write(
                f"tfopt does not know all of TensorFlow {tensorflow} and Keras {keras} yet. It tries {len(patches)} of "
                f"its patches there, about ten seconds each, and keeps the answers in {folder()}.\n"
            )
            with suppress(EOFError, ConnectionError):
                child.connection.send((_SECONDS, [patch.probe.home for patch in patches]))
                while True:
                    yield child.connection.recv()
                    answered += 1
                    if sys.stderr.isatty():
                        sys.stderr.write(f"\r{answered} of {len(patches)} tried")
            if (code := exit_code(child.process)) and not answered:
                raise ChildProcessError(child.last_words().rpartition("\n")[2] or f"exit code {code}")
        finally:
            if sys.stderr.isatty():
                sys.stderr.write("\n")


def main(connection: "Connection[Any, Any]") -> None:
    """In the process of its own: probes patches, each in a fork, and sends what comes of each."""
    seconds, homes = connection.recv()
    importlib.import_module("keras")  # once, for all forks
    running = 0
    for patch in [getattr(*find(home)) for home in homes]:
        if running == min(_AT_ONCE, os.cpu_count() or 1):
            os.wait()
            running -= 1
        running += 1
        _fork(patch, _probed if patch.probe.workers == 1 else _probed_together, connection, seconds)
    for _ in range(running):
        os.wait()


def _fork(
    patch: Any, probe: Callable[[Any], Verdict], connection: "Connection[Any, Any]", seconds: int = _SECONDS
) -> int:
    """Probes a patch in a fork, which sends its name and the verdict; returns the fork's process."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    try:
        die_with(parent)
        signal.alarm(seconds)
        verdict = probe(patch)
        connection.send((patch.name, replace(verdict, why=verdict.why[:_LONGEST])))
    except BaseException:  # noqa: BLE001  nothing of it may reach the caller
        traceback.print_exc()
    os._exit(0)


def _probed_together(patch: Any) -> Verdict:
    """Probes a patch in workers of one cluster, a fork each."""
    count = patch.probe.workers
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    ours, theirs = Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, ours:
        workers = [_fork(patch, partial(_probed_as, index, addresses, folder), theirs) for index in range(count)]
        theirs.close()
        found: list[Verdict] = []
        with suppress(EOFError):
            while not found or found[-1].state != UNFIT:  # else the others may wait for this worker
                found.append(ours.recv()[1])
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    if len(found) < count and (not found or found[-1].state != UNFIT):
        raise ChildProcessError("a worker ended without an answer")
    return found[-1]


def _probed_as(index: int, addresses: Sequence[str], folder: str, patch: Any) -> Verdict:
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
    os.chdir(folder)
    return _probed(patch)


def _probed(patch: Any) -> Verdict:
    import numpy as np
    import tensorflow as tf

    probe: Probe = patch.probe
    if probe.devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * probe.devices)
    try:
        with getattr(*find(probe.throughout)).tried() if probe.throughout else nullcontext():
            plain, stock = _called(probe.harmless), _measured(probe)
            if probe.measure and _is_near(stock, probe.right, probe.tolerance):
                return Verdict(NEEDLESS, f"stock Keras computes {stock}, as it should")
            with patch.tried():
                patched, same = _measured(probe), _called(probe.harmless)
    except (OSError, MemoryError, tf.errors.ResourceExhaustedError):  # of this machine, now
        raise
    except Exception as error:  # noqa: BLE001  a patch that does not fit may raise anything
        return Verdict(UNFIT, f"{type(error).__name__}: {summarize_error(error)}")
    if not np.allclose(same, plain, rtol=_ROUNDING if probe.devices * probe.workers > 1 else 0.0, atol=0.0):
        return Verdict(UNFIT, "with the patch, a training without the defect computes something else than without it")
    if not probe.measure:
        return Verdict(NEEDED, "a training computes the same with the patch and without it")
    right = [REFUSED] * len(_listed(probe.right)) if probe.refuses else probe.right
    if not _is_near(patched, right, probe.tolerance):
        return Verdict(UNFIT, f"Keras computes {patched} with the patch and {stock} without it; {right} is right")
    return Verdict(NEEDED, f"stock Keras computes {stock}, with the patch {patched}")


def _called(path: str) -> Any:
    """What a function returns, under Keras' own policy."""
    import keras

    keras.config.set_dtype_policy("float32")
    return getattr(*find(path))()


def _measured(probe: Probe) -> Any:
    return _called(probe.measure) if probe.measure else probe.right


def outcomes(*trainings: Callable[[], Any]) -> list[Any]:
    """What each training computes, or REFUSED: for `measure` of a defect with several parts."""
    found = []
    for training in trainings:
        try:
            found.append(training())
        except TfoptError:
            found.append(REFUSED)
    return found


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_near(found: Any, right: Any, tolerance: float) -> bool:
    found, right = _listed(found), _listed(right)
    return len(found) == len(right) and all(map(partial(_are_near, tolerance), found, right))


def _are_near(tolerance: float, found: Any, right: Any) -> bool:
    if isinstance(found, str) or isinstance(right, str) or right is None:
        return bool(found == right)
    return bool(abs(found - right) <= tolerance)
