"""How long ago a step of the running `fit` ended, and what fit is doing since: for threads that watch it."""

import contextlib
import gc
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

import tensorflow as tf

SECONDS_SINCE_STEP = "seconds_since_step"
# How long to wait for tf.data to say which batches it has delivered.
_ANSWER_SECONDS = 2.0
_GAPS_KEPT = 100  # by tf.data
_CALLBACK_LIST = "keras/src/callbacks/callback_list.py"
# Where Python waits for an iterator: steps run eagerly, custom loops, and iterators that are being made.
_INPUT = ("data/ops/iterator_ops.py", "data/ops/multi_device_iterator_ops.py", "distribute/input_lib.py")


class Progress:
    """When the last step ended, written by the training thread and read by others.

    A callback makes one in `on_train_begin` and tells it of the hooks that Keras calls.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._moved_at = time.monotonic()
        self.stepped_at: float | None = None
        """When the last training step ended; None before the first."""
        self.step_began_at = self._moved_at
        """When the training step under way began."""
        self.phase = "training"
        """What the last hook tells: "training", "validation" or "between epochs"."""
        self._batch = self._last_batch = -1
        self._batches_before = 0

    def begin_epoch(self, last_batch: int) -> None:
        """Notes that an epoch begins; `last_batch` is its last one's number from 0, or negative if unknown."""
        self._batches_before += self._batch + 1
        self._batch, self._last_batch, self.phase = -1, last_batch, "training"
        self.step_began_at = time.monotonic()

    def end_step(self, batch: int) -> None:
        """Notes that a training step has ended."""
        self._moved_at = self.stepped_at = self.step_began_at = time.monotonic()
        self._batch = batch
        # Keras counts the last execution of several steps as whole.
        self.phase = "between epochs" if batch >= self._last_batch >= 0 else "training"

    def begin_validation_step(self) -> None:
        """Notes that a step of validation begins, so the one before it has ended.

        Call it from `on_test_batch_begin`: a callback with `on_test_batch_end` makes Keras wait for each step's loss.
        """
        self._moved_at = time.monotonic()

    @property
    def seconds_since_step(self) -> float:
        """Seconds since a step of training or validation ended; before the first, since `fit` began."""
        return time.monotonic() - self._moved_at

    def standstill(self) -> tuple[str, str | None]:
        """Returns what fit is doing, a key of `tfopt.causes.alert_causes.NO_STEPS`, and the callback it is in.

        It looks at what the training thread executes. Call it only when no step has ended for long: it takes some
        milliseconds, two seconds if TensorFlow does not answer.
        """
        by_hooks = "first step" if self.phase == "training" and self.stepped_at is None else self.phase
        if threading.get_ident() == self._thread:
            return by_hooks, None
        iterator = None
        frame = thread_frames().get(self._thread)
        hook = ""
        while frame is not None:
            code = frame.f_code
            file = code.co_filename.replace("\\", "/")
            if file.endswith(_CALLBACK_LIST) and hook.endswith("." + code.co_name.lstrip("_")):
                return "callback", hook.rpartition("<locals>.")[2]  # of a class defined in a function
            if file.endswith(_INPUT):
                return "input", None
            if code.co_name == "func_graph_from_py_func":
                return "tracing", None
            iterator = iterator or _iterator_of(frame)
            hook, frame = code.co_qualname, frame.f_back
        del frame  # it may be the training's
        waits = None if iterator is None or self.phase == "between epochs" else self._waits(iterator)
        if waits:
            return "input", None
        return ("step" if by_hooks == "training" and waits is False else by_hooks), None

    def _waits(self, iterator: Any) -> bool | None:
        """Whether a batch was asked of the iterator and has not come; None if it cannot tell."""
        answers: list[tuple[int, int]] = []
        # In a thread of its own: whatever holds the training up may hold this question up as well.
        asking = threading.Thread(target=_ask, args=(iterator, answers), name="tfopt-iterator", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            asking.start()
            asking.join(_ANSWER_SECONDS)
        if not answers:
            return None
        delivered, gaps = answers[0]
        if gaps < _GAPS_KEPT:
            # A gap lasts from a batch's arrival to the next one's request.
            return gaps >= delivered
        # tf.data has forgotten older gaps. Keras makes an iterator for each epoch, or one for all (steps_per_epoch).
        done = self._batch + 1
        counts = {done, self._batches_before + done}
        if delivered in counts and delivered - 1 not in counts:
            return True
        return False if delivered - 1 in counts and delivered not in counts else None


def _iterator_of(frame: FrameType) -> Any:
    # Reading f_locals makes a frame keep its variables until it ends: only where there is such a name.
    if "iterator" not in frame.f_code.co_varnames:
        return None
    found = frame.f_locals.get("iterator")
    return found if isinstance(found, tf.data.Iterator) else None


def _ask(iterator: Any, answers: list[tuple[int, int]]) -> None:
    with contextlib.suppress(Exception):  # autotuning is off, or it is not the iterator of one pipeline
        model = tf.data.experimental.get_model_proto(iterator)
        answers.append((model.nodes[model.output].num_elements, len(model.gap_times)))


def thread_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each running thread."""
    if sys.version_info >= (3, 12):
        return sys._current_frames()
    # Here Python makes the frames under a lock, and what the garbage collector frees meanwhile may need the same one:
    # then all threads stand still for ever (CPython's issue 106883).
    with _COLLECTING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


_COLLECTING = threading.Lock()  # for who switches the garbage collector off
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_COLLECTING.acquire, after_in_parent=_COLLECTING.release)
    os.register_at_fork(after_in_child=_COLLECTING.release)
