"""A trace of TensorFlow's profiler, written by a thread of its own."""

import atexit
import functools
import importlib
import itertools
import os
import queue
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import tensorflow as tf

from tfopt.errors import summarize_error
from tfopt.internals.runtime import is_profiling
from tfopt.warn import warn_once

# The serialized field "name" of an XStatMetadata: tag, length, value.
_LOOP_STAT, _HIDDEN_STAT = b"\x12\x08iter_num", b"\x12\x08loop_num"
_CHUNK = 2**20  # bytes, searched in under a millisecond, while which Python does nothing else
PATIENCE_SECONDS = 30.0  # for the disk
_numbers = itertools.count()
_traces: "weakref.WeakSet[Trace]" = weakref.WeakSet()


class Trace:
    """A trace, recorded from its construction on, and written to `LOG_DIR/plugins/profile/TIME/HOST.xplane.pb`.

    Only its own thread touches the disk, which may hang.

    Args:
        log_dir: Created if missing.
        written: Gets the folder, as soon as the trace is in it.

    Raises:
        tf.errors.AlreadyExistsError: If another profiler is running; a process can record one trace at a time.
        RuntimeError: If no thread can be started.
    """

    def __init__(self, log_dir: Path, written: list[Path]):
        self._log_dir, self._written = log_dir, written
        self._is_over = False
        # A finalizer may run while its own thread holds any lock; only a SimpleQueue is safe to signal with then.
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        # A daemon: at exit nothing else would end it, and `finish` is called first.
        self._thread = threading.Thread(target=self._write, name="tfopt-profiler", daemon=True)
        # While TensorFlow writes a trace, it holds a lock that the next start needs. A disk could hang meanwhile.
        self._memory = f"ram://tfopt-profiler-{next(_numbers)}"
        tf.profiler.experimental.start(self._memory)
        try:
            self._thread.start()
        except RuntimeError:
            tf.profiler.experimental.stop(save=False)
            raise
        atexit.register(self.finish)
        _traces.add(self)

    @property
    def is_being_written(self) -> bool:
        """Whether the recording is over but not written yet."""
        return self._is_over and self._thread.is_alive()

    def give_up(self) -> None:
        """Ends the recording soon, without waiting. For finalizers."""
        self._is_over = True
        self._over.put(None)

    def end(self) -> None:
        """Ends the recording and waits until nothing more is recorded: a twentieth of the time that writing takes."""
        self.give_up()
        while is_profiling() and self._thread.is_alive():  # not alive in a forked child
            time.sleep(0.0005)

    def finish(self, seconds: float | None = PATIENCE_SECONDS) -> bool:
        """Ends the recording, and waits some seconds until it is written (None: for ever); returns whether it is."""
        self.end()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write(self) -> None:
        self._over.get()
        try:
            tf.profiler.experimental.stop()
            (source,) = tf.io.gfile.glob(f"{self._memory}/plugins/profile/*/*.xplane.pb")
            path = _free(self._log_dir / Path(source).relative_to(self._memory))
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")  # XProf must not take it for a trace
            try:
                tf.io.gfile.copy(source, str(unfinished), overwrite=True)
                _hide_loops(unfinished)
                os.replace(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)
            self._written.append(path.parent)
        except Exception as error:  # noqa: BLE001  an observer must not end a training
            _warn(f"to write a trace to {self._log_dir}", error, "Free the disk or choose another log_dir.")
        finally:
            atexit.unregister(self.finish)
            with suppress(tf.errors.NotFoundError):
                tf.io.gfile.rmtree(self._memory)


class StepMark:
    """Marks a step, from construction to `end`, for XProf and, if nvtx is installed, for Nsight Systems."""

    def __init__(self, step: int):
        self._nvtx = _nvtx()
        self._range = self._nvtx.start_range(f"train step {step}") if self._nvtx else None
        # _r=1 makes it the root of a step to XProf. Keras' own marker lacks it.
        self._trace = tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def end(self) -> None:
        """Ends the step."""
        self._trace.__exit__(None, None, None)
        if self._nvtx:
            self._nvtx.end_range(self._range)


def start_trace(log_dir: Path, written: list[Path]) -> Trace | None:
    """Starts a trace; if that fails, warns once and returns None."""
    try:
        return Trace(log_dir, written)
    except tf.errors.AlreadyExistsError as error:
        _warn("to start a trace", error, "Only one profiler can run at a time: leave out profile_batch of TensorBoard.")
    except Exception as error:  # noqa: BLE001  an observer must not end a training
        _warn("to start a trace", error, "Profile with tf.profiler.experimental outside of fit to see more.")
    return None


def is_writing() -> bool:
    """Whether a trace is being written. Starting another one would wait until it is collected."""
    return any(trace.is_being_written for trace in _traces)


def warm_up() -> None:
    """Loads what the profiler needs, so that starting a trace does not delay the steps before it."""
    if is_writing():
        return
    try:
        tf.profiler.experimental.start("")
        tf.profiler.experimental.stop(save=False)
    except Exception:  # noqa: BLE001  start_trace will report it
        return


def _free(path: Path) -> Path:
    """The path, with a number in its folder's name (a time) if there is a trace of the same second."""
    folder, number = path.parent, 1
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{number}") / path.name
    return path


def _hide_loops(path: Path) -> None:
    """Makes XProf recognise marked steps that hold loops, such as an LSTM's or `steps_per_execution`'s.

    If an operation has a stat of this name, XProf takes each loop iteration for a step and ignores the marks
    (`EventForest::CreateEventGroups` in xla/tsl/profiler/utils/group_events.cc). So the stat is renamed, to a name of
    the same length and in place: parsing a trace of 100 MB would block Python for seconds.
    """
    with open(path, "r+b") as file:
        start = 0
        while chunk := os.pread(file.fileno(), _CHUNK + len(_LOOP_STAT) - 1, start):
            at = chunk.find(_LOOP_STAT)
            while at >= 0:
                os.pwrite(file.fileno(), _HIDDEN_STAT, start + at)
                at = chunk.find(_LOOP_STAT, at + 1)
            start += _CHUNK


def _warn(what: str, error: Exception, remedy: str) -> None:
    text = f"Expected {what}. Found: {summarize_error(error)}. The training goes on without the trace. {remedy}"
    warn_once(f"step profiler {type(error).__name__}", text)


@functools.cache
def _nvtx() -> ModuleType | None:
    try:
        return importlib.import_module("nvtx")
    except (ImportError, OSError):
        return None
