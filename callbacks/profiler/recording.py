"""One trace of TensorFlow's profiler: recorded at once, written in a thread of its own."""

import atexit
import functools
import importlib
import os
import queue
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType

import tensorflow as tf
from tensorflow.python.profiler.trace import enabled

from tfopt.errors import essence
from tfopt.warn import warn_once

# As the field "name" of an XStatMetadata is serialized: its tag, its length, itself.
_LOOP_STAT, _HIDDEN_STAT = b"\x12\x08iter_num", b"\x12\x08loop_num"
_PART = 2**20  # bytes, searched in less than a millisecond, in which Python does nothing else
_recordings: "weakref.WeakSet[Recording]" = weakref.WeakSet()


class Recording:
    """A trace that is recorded from the moment when this is made. A process has one at a time.

    Args:
        log_dir: The trace is written to `LOG_DIR/plugins/profile/TIME/HOST.xplane.pb`.

    Attributes:
        folder: Where it was written; None before, and where that failed.

    Raises:
        tf.errors.AlreadyExistsError: Another profiler is running.
        RuntimeError: No thread can be started.

    Example:
        >>> recording = Recording(Path("logs"))
        >>> model.fit(dataset)
        >>> recording.finish()
    """

    def __init__(self, log_dir: Path):
        self._log_dir = log_dir
        self._before = _folders(log_dir)
        self.folder: Path | None = None
        self._is_over = False
        # The one way to tell a thread that is safe in a finalizer, which may run while this very thread holds any lock.
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Not to be waited for at exit, where nobody else would end it; `finish` is called there first.
        self._thread = threading.Thread(target=self._write, name="tfopt-profiler", daemon=True)
        tf.profiler.experimental.start(str(log_dir))
        try:
            self._thread.start()
        except RuntimeError:
            tf.profiler.experimental.stop(save=False)
            raise
        atexit.register(self.finish)
        _recordings.add(self)

    @property
    def is_being_written(self) -> bool:
        """Whether the recording is over, and its file not there yet."""
        return self._is_over and self._thread.is_alive()

    def give_up(self) -> None:
        """Ends the recording in a while, without waiting for anything. For finalizers."""
        self._is_over = True
        self._over.put(None)

    def end(self) -> None:
        """Ends the recording, and returns when nothing more is recorded: a twentieth of the time that writing takes."""
        self.give_up()
        while enabled() and self._thread.is_alive():  # it is not alive in a forked child
            time.sleep(0.0005)

    def finish(self) -> None:
        """Ends the recording, and returns when it is written."""
        self.end()
        self._thread.join()

    def _write(self) -> None:
        self._over.get()
        try:
            tf.profiler.experimental.stop()
            folders = _folders(self._log_dir)
            # None is new where one was written in the same second, whose place this one took.
            folder = max(folders - self._before or folders)
            for path in folder.glob("*.xplane.pb"):
                _hide_loops(path)
            self.folder = folder
        except Exception as error:  # noqa: BLE001  what looks on must not end a training
            _warn(f"to write a trace to {self._log_dir}", error, "Free the disk or choose another log_dir.")
        finally:
            atexit.unregister(self.finish)


class StepMark:
    """Marks a step, from its making to its end, for XProf (while it records) and, with nvtx, for Nsight Systems.

    Args:
        step: Its number.
    """

    def __init__(self, step: int):
        self._nvtx = _nvtx()
        self._range = self._nvtx.start_range(f"train step {step}") if self._nvtx else None
        # _r=1 is what makes it the root of a step to XProf. Keras' own marker lacks it.
        self._trace = tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def end(self) -> None:
        """Ends the step."""
        self._trace.__exit__(None, None, None)
        if self._nvtx:
            self._nvtx.end_range(self._range)


def record(log_dir: Path) -> Recording | None:
    """Starts a recording; where that fails, says why, once, and returns None."""
    try:
        return Recording(log_dir)
    except tf.errors.AlreadyExistsError as error:
        _warn("to start a trace", error, "One profiler can run at a time: leave out profile_batch of TensorBoard.")
    except Exception as error:  # noqa: BLE001  what looks on must not end a training
        _warn("to start a trace", error, "Profile with tf.profiler.experimental outside of fit to see more.")
    return None


def is_writing() -> bool:
    """Whether some trace is being written. Starting another one would wait for that."""
    return any(recording.is_being_written for recording in _recordings)


def warm_up() -> None:
    """Loads what the profiler needs, so that the start of a trace does not stop the steps before it for that."""
    try:
        tf.profiler.experimental.start("")
        tf.profiler.experimental.stop(save=False)
    except Exception:  # noqa: BLE001  the start of the trace will tell
        return


def _folders(log_dir: Path) -> set[Path]:
    """The traces in a folder. Their names are times, so that the last one is the newest."""
    return set((log_dir / "plugins" / "profile").glob("*/"))


def _hide_loops(path: Path) -> None:
    """Lets XProf take the marked steps for steps where these hold loops, as an LSTM's or `steps_per_execution`'s.

    Where an operation has a stat of this name, each iteration of a loop is a step to XProf, and marks are none
    (`EventForest::CreateEventGroups` in xla/tsl/profiler/utils/group_events.cc). So the stat gets another name, of the
    same length: in place, as reading a trace of 100 MB into messages would keep Python from all else for seconds.
    """
    with open(path, "r+b") as file:
        start = 0
        while part := os.pread(file.fileno(), _PART + len(_LOOP_STAT) - 1, start):
            at = part.find(_LOOP_STAT)
            while at >= 0:
                os.pwrite(file.fileno(), _HIDDEN_STAT, start + at)
                at = part.find(_LOOP_STAT, at + 1)
            start += _PART


def _warn(what: str, error: Exception, remedy: str) -> None:
    text = f"Expected {what}. Found: {essence(error)}. The training goes on without the trace. {remedy}"
    warn_once(f"step profiler {type(error).__name__}", text)


@functools.cache
def _nvtx() -> ModuleType | None:
    try:
        return importlib.import_module("nvtx")
    except (ImportError, OSError):
        return None
