"""Several training steps in one launch, of which callbacks hear one by one.

Keras' loop stays: of K calls the first launches one program that loops over K batches, and each returns the logs of its
own step. Weights, optimizer, metrics and the position in the data are meanwhile those of the launch's last step, so a
callback that might act between two steps makes it one step a launch.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.errors import UnsupportedError
from tfopt.fit.launching import END, OverlappedStep, is_known, launcher, overlapped_step
from tfopt.fit.logs import LazyLogs
from tfopt.fit.trial import Trial
from tfopt.internals.fit_door import RunningFit, current_iterator, first_step, running_fit, steps_left
from tfopt.pipelines.shared.nondeterminism import draws_of_kernels
from tfopt.warn import warn_once

_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_READ_LOGS = (keras.callbacks.ProgbarLogger, keras.callbacks.History)  # and do nothing else on a batch
_UNLIKE = 3  # times that batches were not alike, after which it is no longer tried
_SAVE = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class ManySteps(OverlappedStep):
    """Keras' train function, which launches several steps at once where nothing acts between them."""

    def __init__(self, stock: Callable[[Any], Any], model: keras.Model, overlap: Any):
        super().__init__(stock, model, overlap)
        self._of: Callable[[], Any] = lambda: None  # the iterator that the following belong to
        self._held: deque[Any] = deque()  # batches taken and not launched; END or an exception comes last
        self._ready: deque[Any] = deque()  # logs of steps launched and not returned; an exception comes last
        self._fit: RunningFit | None = None  # which clears them when it ends
        self._stops = False  # whether a callback asked, within a launch, for the training to stop
        self._drawing: list[Any] | None = None  # what of the traced step draws from states of its kernels
        self._unlike = 0  # how often batches were not alike
        # By what makes the batches: a device stage, which holds the examples, is freed with its dataset.
        self._programs: weakref.WeakKeyDictionary[Any, dict[Any, _Program | None]] = weakref.WeakKeyDictionary()

    @property
    def ahead(self) -> int:
        """As of `OverlappedStep`."""
        return len(self._ready) + sum(not _is_end(batch) for batch in self._held)

    def __call__(self, iterator: Any) -> Any:
        """Returns the logs of the next step; launches it, and those after it, if it is not launched yet."""
        if not hasattr(iterator, "element_spec"):  # train_on_batch's generator
            return self.stock(iterator)
        if self._of() is not iterator:
            self._begin(iterator)
        if not self._ready:
            # Those that were held back run alone first, so that callbacks do not wait long for a step to act on.
            steps = 1 if self._held else self._steps(iterator)
            if steps == 1 and not self._held:
                return super().__call__(iterator)
            self._ready.extend(self._launched(iterator, steps))
        logs = self._ready.popleft()
        if isinstance(logs, Exception):
            raise logs
        return logs

    def begin_hooks(self) -> None:
        """Lets a stop that was asked for within a launch come with its last step."""
        if self._stops and not self.ahead:
            self._stops, self._model.stop_training = False, True

    def end_hooks(self) -> None:
        """Keeps a stop until the launch is over."""
        if self.ahead and self._model.stop_training:
            self._stops, self._model.stop_training = True, False

    def _begin(self, iterator: Any) -> None:
        if self._ready:
            raise UnsupportedError(
                f"Expected one training of {self._model.name!r} at a time. Found that a callback trains it "
                "within a launch of several steps. Train it at the end of an epoch, or where acts_every says "
                "(docs/fit.md)."
            )
        running = running_fit()
        if running is not None and running is not self._fit:
            running.ends.callback(self._forget)  # also if an exception ends it
        self._forget()
        self._of, self._fit = weakref.ref(iterator), running

    def _forget(self) -> None:
        self._of, self._fit = lambda: None, None
        self._held.clear()
        self._ready.clear()
        self._stops = False

    def _steps(self, iterator: Any) -> int:
        """How many steps to launch now."""
        running = running_fit()
        if running is None or running.epochs is None or current_iterator(running.epochs) is not iterator:
            return 1  # a loop of the user's own
        self._prepare(iterator)
        if obstacle := self._obstacle(running.callbacks):
            self._warn(obstacle)
            return 1
        wanted, step = self.overlap.steps_per_launch, first_step(running.epochs)
        if isinstance(wanted, Trial):
            wanted = wanted.steps_now(running, self.overlap.in_flight)
        every = filter(None, map(_acts_every, running.callbacks.callbacks if running.callbacks else ()))
        most = min((one - step % one for one in every), default=wanted)
        return wanted if wanted <= min(most, steps_left(running.epochs)) else 1

    def _warn(self, found: str) -> None:
        warn_once(f"steps_per_launch {found}", f"Expected to launch several steps at once. Found {found}.")

    def _obstacle(self, callbacks: Any) -> str | None:
        """Why each step has to be launched alone, if it has."""
        alone = "so each step is launched alone"
        if overlapped_step(self._model) is not self:
            return f"a train_function of your own, {alone}"
        if self._model.steps_per_execution != 1:
            return f"steps_per_execution={self._model.steps_per_execution}, {alone}"
        if self._traced is None or not all(type(leaf) is tf.TensorSpec for leaf in tf.nest.flatten(self._spec)):
            return f"eager steps, or batches that are not dense tensors, {alone}"
        if not _are_numbers(self._traced.structured_outputs):
            return f"a train_step whose logs are not numbers of one floating-point type, {alone}"
        if draws := self._draws():
            return f"{draws[0]}, which draws from a state of its own in each traced function, {alone}"
        if self._unlike >= _UNLIKE:
            return f"batches whose shapes change from one to the next, {alone}"
        if type(callbacks) is not keras.callbacks.CallbackList:
            return f"{type(callbacks).__name__}, which may act between steps, {alone}"
        if hook := hook_between_steps(callbacks.callbacks):
            return (
                f"{hook}, which may act between steps, {alone}. If it only reads `logs`, give the callback the "
                "attribute acts_every = 0; if it acts after every N-th batch, acts_every = N"
            )
        return None

    def _launched(self, iterator: Any, steps: int) -> Iterator[Any]:
        """Launches so many steps, or one if there are not as many batches alike; returns their logs."""
        held, stage = self._held, getattr(iterator, "stage", None)
        take = self._take if stage is None else next
        while len(held) < steps and not (held and _is_end(held[-1])):
            try:
                held.append(take(iterator if stage is None else iterator.elements, END))
            except Exception as error:  # noqa: BLE001  raised when its turn comes
                held.append(error)
        batches = [tf.nest.flatten(batch) for batch in held if not _is_end(batch)]
        shapes = {tuple(tuple(leaf.shape) for leaf in batch) for batch in batches}
        program = None
        self._unlike += steps == len(batches) and len(shapes) > 1
        if 1 < steps == len(batches) and len(shapes) == 1:
            program = self._program(steps, held[0], stage)
        if program is not None:
            yield from program.launched(batches)
            held.clear()
        elif held[0] is END:
            yield tf.errors.OutOfRangeError(None, None, "End of sequence")
        elif isinstance(held[0], Exception):
            yield held.popleft()
        else:
            batch = held.popleft()
            yield self._settled(self._run(batch if stage is None else stage.batch(batch)))

    def _program(self, steps: int, first: Any, stage: Any) -> "_Program | None":
        """The program of so many steps, None if it cannot be made; `first` is a batch, or what a stage makes it of."""
        programs = self._programs.setdefault(self._one_step if stage is None else stage, {})
        kind = steps, None if stage is None else tuple(tuple(leaf.shape) for leaf in tf.nest.flatten(first))
        if kind not in programs:
            try:
                compiled = bool(self._model.jit_compile)
                programs[kind] = _Program(
                    self._traced, self._spec, steps, self.overlap, stage, first, compiled=compiled
                )
            except Exception as error:  # noqa: BLE001  what works alone must not fail together
                programs[kind] = None
                self._warn(f"that they cannot be traced together, so each is launched alone: {error}")
        return programs[kind]

    def _draws(self) -> list[Any]:
        if self._drawing is None:
            self._drawing = draws_of_kernels(self._traced)
        return self._drawing

    def _trace(self, spec: Any) -> tuple[Any, bool]:
        self._programs.clear()
        self._drawing, self._unlike = None, 0
        return super()._trace(spec)


class _Program:
    """A traced step, run a number of times in one launch.

    Args:
        step: The step, as TensorFlow traced it.
        spec: The element spec of its batches.
        steps: How many steps.
        overlap: The overlap of its model.
        stage: The device stage that makes batches in the program, or None.
        first: What it makes a batch of.
        compiled: Whether XLA compiles the step.
    """

    def __init__(self, step: Any, spec: Any, steps: int, overlap: Any, stage: Any, first: Any, *, compiled: bool):
        self._steps, self._overlap = steps, overlap
        keys = sorted(step.structured_outputs)
        # The step's own shapes: knowing more, TensorFlow would fold a division by the batch size, and round otherwise.
        own = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in step.inputs[: len(tf.nest.flatten(spec))]]
        given = own if stage is None else [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in tf.nest.flatten(first)]
        width = len(given)
        # Each step's logs. Unlike a TensorArray's, they are there if a later step fails.
        self._rows = tf.Variable(tf.zeros((steps, len(keys)), step.structured_outputs[keys[0]].dtype), trainable=False)
        with tf.device("CPU:0"):
            self._done = tf.Variable(0, dtype=tf.int64, trainable=False)  # steps, of all launches
        self._done_before: int | None = 0  # None after a launch that was interrupted
        self._keys = keys

        if stage is not None:
            stage.batch(first)  # loads the examples, which a trace cannot
            stage = weakref.proxy(stage)

        def batch_of(leaves: Any) -> Any:
            if stage is not None:
                leaves = tf.nest.flatten(stage.batch(tf.nest.pack_sequence_as(first, leaves)))
                leaves = [
                    tf.compat.v1.placeholder_with_default(leaf, one.shape)
                    for leaf, one in zip(leaves, own, strict=True)
                ]
            return tf.nest.pack_sequence_as(spec, leaves)

        def many(*leaves: Any) -> Any:
            lists = [tf.TensorArray(one.dtype, steps, element_shape=one.shape) for one in given]  # which copy nothing
            for place, leaf in enumerate(leaves):
                lists[place % width] = lists[place % width].write(place // width, leaf)

            def once(number: Any) -> Any:
                logs = step(batch_of([each.read(number) for each in lists]))
                row = self._rows[number].assign(tf.stack([logs[key] for key in keys]))
                with tf.control_dependencies([row]):
                    self._done.assign_add(1)
                return number + 1

            # One step after another: each reads what the one before wrote.
            tf.while_loop(lambda number: number < steps, once, (0,), parallel_iterations=1)
            return self._rows.read_value()

        function = tf.function(many, autograph=False)
        program = function.get_concrete_function(*given * steps)
        # `tfopt.xla.watch` follows calls of a tf.function, for compiled steps.
        whole = function if compiled else program
        self._launch = launcher(program) if whole is program and is_known() else lambda leaves: whole(*leaves)

    def launched(self, batches: Sequence[Sequence[Any]]) -> Iterator[Any]:
        """Launches steps on these batches, as leaves; returns the logs of each. Of one that failed, its exception."""
        failed: Exception | None = None
        before = int(self._done) if self._done_before is None else self._done_before
        self._done_before = None
        try:
            rows = _Rows(self._launch([leaf for batch in batches for leaf in batch]))
            self._overlap.in_flight.launched(rows.tensor, self._steps)
            done = self._steps
        except Exception as error:  # noqa: BLE001  raised when its turn comes
            rows, failed = _Rows(self._rows.read_value()), error
            done = int(self._done) - before
        self._done_before = before + done
        for number in range(done):
            yield StepLogs(self._keys, rows, number)
        if failed is not None:
            yield failed


class _Rows:
    """The logs of a launch's steps, a row each; the first read copies all to the host."""

    def __init__(self, tensor: tf.Tensor):
        self.tensor = tensor
        self._read: Any = None

    def __getitem__(self, number: int) -> Any:
        if self._read is None:
            self._read = self.tensor.numpy()
        return self._read[number]


class StepLogs(LazyLogs):
    """`LazyLogs` of one step of a launch.

    Args:
        keys: The names of its logs.
        rows: The logs of all its steps.
        number: Which step it is.
    """

    __slots__ = ("_number", "_rows")

    def __init__(self, keys: Sequence[str], rows: _Rows, number: int):
        super().__init__(dict.fromkeys(keys))
        self._rows, self._number = rows, number

    def read(self) -> "StepLogs":
        """Converts the values if they are not converted yet, and returns itself."""
        if self._tensors is not None:
            self._tensors = dict(zip(self._tensors, self._rows[self._number], strict=True))
            super().read()
        return self


def _is_end(batch: Any) -> bool:
    return batch is END or isinstance(batch, Exception)


def _are_numbers(logs: Any) -> bool:
    if not isinstance(logs, dict) or not all(isinstance(log, tf.Tensor | tf.TensorSpec) for log in logs.values()):
        return False
    kinds = {(log.dtype, log.shape.rank) for log in logs.values()}
    return len(kinds) == 1 and all(dtype.is_floating and rank == 0 for dtype, rank in kinds)


def _acts_every(callback: keras.callbacks.Callback) -> int | None:
    """After how many batches a callback says that it acts, 0 for never; None if it does not say."""
    every = getattr(callback, "acts_every", None)
    if every is None or not _says_it_of_its_hooks(callback):
        return None
    remedy = "Give it 0 if it only reads `logs`, N if it acts after every N-th batch of an epoch."
    return checks.integer(f"{type(callback).__name__}.acts_every", every, remedy, least=0)


def _says_it_of_its_hooks(callback: keras.callbacks.Callback) -> bool:
    """Whether `acts_every` is of the class that overrides batch hooks last, or of one below it; tfopt's inherit it."""
    if "acts_every" in vars(callback):
        return True
    for kind in type(callback).__mro__:
        if "acts_every" in vars(kind):
            return not any(name in vars(callback) for name in _HOOKS)
        if any(name in vars(kind) for name in _HOOKS) and not kind.__module__.startswith("tfopt."):
            return False
    return False


def hook_between_steps(callbacks: Iterable[keras.callbacks.Callback]) -> str | None:
    """The first hook by which one of these callbacks may act between steps, with its class; None if none has any."""
    for callback in callbacks:
        if _acts_every(callback) is None and (hook := _acting_hook(callback)):
            return f"{type(callback).__name__}.{hook}"
    return None


def _acting_hook(callback: keras.callbacks.Callback) -> str | None:
    """The hook by which a callback may act between steps, if it has one."""
    if type(callback) in _READ_LOGS or (type(callback) in _SAVE and callback.save_freq == "epoch"):
        return None
    if type(callback) is keras.callbacks.TensorBoard:
        by_epoch = callback.update_freq == "epoch" and not callback.write_steps_per_second
        return None if by_epoch and not callback._start_batch and not callback._stop_batch else "on_train_batch_end"
    for name in _HOOKS:
        # A LambdaCallback sets those that it is not given to functions of its own.
        hook = vars(callback).get(name, getattr(type(callback), name))
        if (
            hook is not getattr(keras.callbacks.Callback, name)
            and hook.__module__ != keras.callbacks.LambdaCallback.__module__
        ):
            return name
    return None
