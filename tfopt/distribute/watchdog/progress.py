"""How far this training process has come: its place in the training, and a deadline for its next sign of progress."""

import functools
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tfopt.distribute.watchdog.training_process import Intervals
from tfopt.internals.patches import Patch, put

BY = "count_progress"
# Hooks of Keras' CallbackList, and where in which loop the process then is.
_PLACES = {
    "on_epoch_begin": ("start", "epoch"),
    "on_train_batch_begin": ("step", "epoch"),
    "on_epoch_end": ("end", "epoch"),
    "on_train_end": ("end", "fit"),
    "on_test_begin": ("start", "evaluate"),
    "on_test_batch_begin": ("step", "evaluate"),
    "on_test_end": ("end", "evaluate"),
    "on_predict_begin": ("start", "predict"),
    "on_predict_batch_begin": ("step", "predict"),
    "on_predict_end": ("end", "predict"),
}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_TFOPT = str(Path(__file__).parents[2])


class Progress:
    """What the hooks of `count_progress` have seen. There is one for the process: `progress`."""

    def __init__(self) -> None:
        self.placed = False  # whether the hooks that name the place are there
        self.counted = False  # whether those of the deadline are
        self.moves = 0
        self.at = self.loop = ""
        self.epoch = self.step = 0

    @property
    def place(self) -> str:
        """Where the process is, such as "epoch 2, step 7" or "the end of fit"; empty before Keras' first loop."""
        loop = f"epoch {self.epoch}" if self.loop == "epoch" else self.loop
        return f"{loop}, step {self.step}" if self.at == "step" else loop and f"the {self.at} of {loop}"


progress = Progress()


class Deadline:
    """Tells the heartbeat thread that another thread has made no progress for too long, and where it waits.

    It is off if `intervals.progress_seconds` is None, and before `count_progress`.
    """

    def __init__(self, intervals: Intervals, thread: int, *, clock: Callable[[], float] = time.monotonic):
        self._intervals = intervals
        self._thread = thread
        self._clock = clock
        self._moves = -1
        self._still_seconds = 0.0
        self._checked_at = clock()

    def missed(self) -> str:
        """Returns where the thread waits, once it has waited too long. Call it at every heartbeat."""
        now = self._clock()
        # At most two heartbeats: while the process was stopped, it could not make progress.
        elapsed, self._checked_at = min(now - self._checked_at, 2 * self._intervals.beat_seconds), now
        if progress.moves != self._moves:
            self._moves, self._still_seconds = progress.moves, 0.0
        else:
            self._still_seconds += elapsed
        limit = self._intervals.progress_seconds
        if limit is None or not progress.counted or self._still_seconds < limit:
            return ""
        frames = _down_to_own(sys._current_frames().get(self._thread))
        # A worker in TensorFlow may wait for one whose Python waits: that one is to be named.
        if self._still_seconds < limit + self._intervals.silent_seconds and any(map(_is_tensorflow, frames)):
            return ""
        since = progress.place and f", since {progress.place}"
        return f"it has made no progress for {self._still_seconds:.0f} s{since}, and waits in {_waits_in(frames)}"


def count_progress(*, deadline: bool = True) -> None:
    """Counts what a training does as progress, until the process ends. `tfopt.distribute.strategy()` calls it.

    Call it yourself only after a strategy that you create yourself; without it, TFOPT_WATCH_PROGRESS_SECONDS has no
    effect and no message names a step. Progress is each batch of `fit`, `evaluate` and `predict`, and the begin and the
    end of each call of a tf.function or `strategy.run`, and of saving and loading a model or a tf.train.Checkpoint.

    Args:
        deadline: Whether to count more than the batches of Keras, which suffice to name a step.
    """
    import keras
    import tensorflow as tf

    if not progress.placed:
        progress.placed = True
        callbacks = keras.callbacks.CallbackList
        put(Patch(callbacks, name, functools.partial(_placed, *place), BY) for name, place in _PLACES.items())
    if deadline and not progress.counted:
        progress.counted = True
        counted = (
            (type(tf.function(count_progress)), ["__call__"]),
            (tf.distribute.Strategy.__base__, ["run"]),
            (tf.train.CheckpointManager, ["save"]),
            (tf.train.Checkpoint, ["write", "save", "read", "restore"]),
            (keras.Model, ["save", "save_weights", "load_weights"]),
        )
        put(Patch(owner, name, _counted, BY) for owner, names in counted for name in names)


def _counted(stock: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        progress.moves += 1
        try:
            return stock(*args, **kwargs)
        finally:
            progress.moves += 1

    return counted


def _placed(at: str, loop: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        progress.moves += 1
        progress.at, progress.loop = at, loop
        if at == "step":
            progress.step = (*args, *kwargs.values())[0] + 1
        elif loop == "epoch":
            progress.epoch = (*args, *kwargs.values())[0] + 1
        stock(self, *args, **kwargs)

    return hook


def _down_to_own(frame: FrameType | None) -> list[FrameType]:
    """The frames at the top of a stack, the last of which is the innermost of the user's own code, if there is one."""
    frames = []
    while frame is not None:
        frames.append(frame)
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, _TFOPT, "<frozen")):
            break
        frame = frame.f_back
    return frames


def _is_tensorflow(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("tensorflow.")


def _waits_in(frames: list[FrameType]) -> str:
    """The innermost line of the user's own code, and the function at the top of the stack."""
    codes = [(each.f_code.co_name, each.f_code.co_filename, each.f_lineno) for each in (*frames[-1:], *frames[:1])]
    where = dict.fromkeys(f"{name} ({file}:{line})" for name, file, line in codes)
    return ", in ".join(where) or "a thread that has ended"
