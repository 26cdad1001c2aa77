"""What the process of `tfopt.internals.probing` does: it trains stock Keras, then patched Keras, in a fork a patch."""

import importlib
import json
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tfopt.errors import TfoptError, summarize_error
from tfopt.internals.probe import NEEDED, NEEDLESS, UNFIT, Probe, Verdict, key_of
from tfopt.internals.sources import find
from tfopt.processes import die_with

REFUSED = "refused"
"""What a probe measures where tfopt refuses the training."""
_OTHER_CODE = "this process runs other code than a new one: restart it, and put nothing of yours in place of Keras' own"
HOST = "127.0.0.1"
_AT_ONCE = 4
_ROUNDING = 1e-4  # relatively, of sums over replicas
_LONGEST = 600  # characters of a reason, at most 6 bytes each: a pipe takes 4,096 in one piece


def main(connection: "Connection[Any, Any]") -> None:
    """In the process of its own: probes patches, each in a fork, and sends what comes of each."""
    seconds, asked = connection.recv()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as it may be inherited, nothing could be waited for
    importlib.import_module("keras")  # once, for all forks
    running = 0
    for home, key in asked:
        patch = getattr(*find(home))
        probe = _probed if patch.probe.workers == 1 else partial(_probed_together, seconds)
        if running == min(_AT_ONCE, os.cpu_count() or 1):
            os.wait()
            running -= 1
        running += 1
        _fork(patch, probe if key_of(patch) == key else _not_probed, connection, seconds)
    for _ in range(running):
        os.wait()


def _not_probed(patch: Any) -> Verdict:
    return Verdict(UNFIT, _OTHER_CODE, lasts=False)


def _fork(patch: Any, probe: Callable[[Any], Verdict], connection: "Connection[Any, Any]", seconds: int) -> int:
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


def _probed_together(seconds: int, patch: Any) -> Verdict:
    """Probes a patch in workers of one cluster, a fork each."""
    count = patch.probe.workers
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        addresses = [f"{HOST}:{one.getsockname()[1]}" for one in sockets]
    ours, theirs = Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, ours:
        probes = [partial(_probed_as, index, addresses, folder) for index in range(count)]
        workers = [_fork(patch, probe, theirs, seconds) for probe in probes]
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
    except Exception as error:  # a patch that does not fit may raise anything
        lost = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.UnknownError)
        if probe.workers > 1 and isinstance(error, lost):  # the other worker, or a port
            raise
        return Verdict(UNFIT, f"{type(error).__name__}: {summarize_error(error)}")
    rounding = _ROUNDING if probe.devices * probe.workers > 1 else 0.0
    if len(same) != len(plain) or not np.allclose(same, plain, rtol=rounding, atol=0.0):
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
