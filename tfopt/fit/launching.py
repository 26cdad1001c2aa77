"""Launches training steps without waiting for them, up to a limit."""

import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfopt.fit.logs import LogDelivery, is_settled
from tfopt.internals.runtime import OwnedIterator
from tfopt.internals.sources import find, fingerprint
from tfopt.model.batches import OVERLAP

END = object()
"""What stands for a batch where the data have ended."""

# The functions that `next_tensors` and `launcher` replace, by fingerprint.
_FUNCTIONS = "tensorflow.python.eager.polymorphic_function"
_KNOWN = {
    f"{_FUNCTIONS}.concrete_function:ConcreteFunction._call_with_structured_signature": "dccf363b41619a39",
    f"{_FUNCTIONS}.concrete_function:ConcreteFunction._call_flat": "75ea37391878b11e",
    "tensorflow.python.data.ops.iterator_ops:OwnedIterator._next_internal": "3b50cd2eb8349468",
}


class InFlight:
    """Limits how many steps are launched but not done, since each holds its batch.

    Every `most // 2`-th step is marked, and before more than `most` steps are out the oldest mark is awaited. A thread
    does the waiting: a copy from a GPU completes after everything launched before it, so it is requested early, not
    when the limit is reached, to keep the device busy.

    Args:
        most: Most steps in flight.
        idle: Whether there is nothing to wait for: a CPU has finished a step when its call returns.
    """

    def __init__(self, most: int, *, idle: bool):
        self._every = max(1, most // 2)
        self._marks_out = most // self._every
        self._idle = idle
        self.waits_every = 1 if idle else self._every
        """Steps between waits; 1 if each step has ended when its call returns."""
        self.waited = 0
        """How often a step had to wait: the device was the limit."""
        self._unmarked = 0
        self._marks: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfopt-fit")  # starts with its first task

    def launched(self, outputs: Any, steps: int = 1) -> None:
        """Counts steps by what their launch returns, and waits if the next would be one too many."""
        if self._idle:
            return
        self._unmarked += steps
        if self._unmarked >= self._every:
            self._unmarked = 0
            self._marks.append(self._thread.submit(_end_of(outputs)))
            if len(self._marks) == self._marks_out:
                oldest = self._marks.popleft()
                self.waited += not oldest.done()
                oldest.result()


@dataclass(slots=True, eq=False, kw_only=True)
class Overlap:
    """The overlap of one model."""

    log_every: int
    """Steps between updates of the progress bar."""
    in_flight: InFlight
    steps_per_launch: Any = 1
    """Most training steps in a launch, or the `Trial` that chooses their number."""
    deliveries: "weakref.WeakKeyDictionary[keras.callbacks.CallbackList, LogDelivery]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """How each of the model's callback lists gets its logs."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Methods put into the model's `__dict__`, by name."""

    @property
    def most_steps(self) -> int:
        """Most training steps in a launch."""
        return int(getattr(self.steps_per_launch, "most", self.steps_per_launch))


def overlap_of(model: Any) -> Overlap | None:
    """Returns the overlap of a model, or None if it has none."""
    return getattr(model, "__dict__", {}).get(OVERLAP)


def overlapped_step(model: Any, name: str = "train_function") -> "OverlappedStep | None":
    """The overlapped step that a model trains or evaluates by, if any, even if a callback has wrapped it."""
    step: Any = getattr(model, name, None)
    while not isinstance(step, OverlappedStep) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step if isinstance(step, OverlappedStep) else None


def steps_ahead(model: Any) -> int:
    """How many steps a model's weights, or its data, are ahead of the step that callbacks hear of: within a launch.

    A callback that saves or changes the training's state does so where this is 0.
    """
    step = None if overlap_of(model) is None else overlapped_step(model)
    return 0 if step is None else step.ahead


class OverlappedStep:
    """Keras' train or test function, with the batch taken before the step instead of inside it.

    The step itself is Keras' own. Its batch is taken eagerly, so that no part of the step has run when the data ends.
    Inside a graph, whatever does not depend on the batch has run by then, and Keras counts a step too many if it does
    not know how many there are. It is also cheaper: one graph is called, not two and a comparison. `stock` is what
    Keras' `_make_function` returned.
    """

    def __init__(self, stock: Callable[[Any], Any], model: keras.Model, overlap: Overlap):
        self.stock = stock
        self._model = model
        self.overlap = overlap
        self._one_step = inspect.getclosurevars(stock).nonlocals["one_step_on_data"]
        # How to take batches of a spec, and to launch a step on them.
        self._spec: Any = None
        self._kind: Any = None
        self._take: Callable[..., Any] = next
        self._launch: Callable[[Any], Any] = self._one_step
        self._traced: Any = None  # the step as TensorFlow traced it, if it takes whole batches

    @property
    def ahead(self) -> int:
        """See `steps_ahead`."""
        return 0

    def begin_hooks(self) -> None:
        """Called before a step's callbacks."""

    def end_hooks(self) -> None:
        """Called after a step's callbacks."""

    def __call__(self, iterator: Any) -> Any:
        """Launches the steps of one execution; takes and returns what Keras' function does."""
        if not hasattr(iterator, "element_spec"):  # train_on_batch's generator
            return self.stock(iterator)
        self._prepare(iterator)
        steps = self._model.steps_per_execution
        batch = self._take(iterator, END)
        if batch is END:  # like Keras' function, for custom loops
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") if steps == 1 else StopIteration
        outputs = self._run(batch)
        for _ in range(steps - 1):
            batch = self._take(iterator, END)
            if batch is END:
                break
            outputs = self._run(batch)
        return self._settled(outputs)

    def _settled(self, outputs: Any) -> Any:
        if is_settled(outputs):
            return outputs
        # An eager step may return variables, which the next step changes. As in Keras' function, an Optional turns
        # variables, numbers and lists into tensors.
        return tf.experimental.Optional.from_value(outputs).get_value()

    def _run(self, batch: Any) -> Any:
        outputs = self._launch(batch)
        self.overlap.in_flight.launched(outputs)
        return outputs

    def _prepare(self, iterator: Any) -> None:
        spec, eager = iterator.element_spec, tf.config.functions_run_eagerly()
        kind = (type(iterator), eager, tf.config.experimental.get_synchronous_execution())
        if kind == self._kind and (spec is self._spec or spec == self._spec):
            return
        self._take, self._launch, self._kind = next, self._one_step, None  # in case tracing fails
        self._traced = None
        # Not model.run_eagerly, which may have changed since the step was made.
        if not eager and isinstance(self._one_step.__wrapped__, tf.types.experimental.PolymorphicFunction):
            concrete, whole = self._trace(spec)
            self._launch = concrete if whole else self._model._autoconvert_optionals(concrete)
            self._traced = concrete if whole else None
            if takes_shortcut(iterator):
                self._take, self._launch = next_tensors, launcher(concrete)
        self._spec, self._kind = spec, kind

    def _trace(self, spec: Any) -> tuple[Any, bool]:
        """Returns the step traced for batches of a spec, and whether every part is present.

        Traced by the spec, not the first batch, so that a smaller last batch is not traced, and compiled, again.
        """
        leaves = keras.tree.flatten(spec)
        missing = [isinstance(leaf, tf.OptionalSpec) for leaf in leaves]
        if any(missing):
            parts = [None if absent else leaf for leaf, absent in zip(leaves, missing, strict=True)]
            spec = keras.tree.pack_sequence_as(spec, parts)
        return self._one_step.__wrapped__.get_concrete_function(spec), not any(missing)


def takes_shortcut(iterator: Any) -> bool:
    """Whether `next_tensors` and `launcher` work: for an iterator over plain tuples of tensors, in a known TensorFlow.

    They skip TensorFlow's handling of structures and signatures. On two CPU cores, `next` on an iterator costs 160 µs
    and a call of a traced function 200 µs, more than the operations they run: a third of a tiny model's overlapped
    step. Only that time depends on the shortcut.
    """
    spec = iterator.element_spec
    plain = (
        type(iterator) is OwnedIterator and type(spec) is tuple and all(type(leaf) is tf.TensorSpec for leaf in spec)
    )
    return plain and is_known() and tf.config.experimental.get_synchronous_execution()


def next_tensors(iterator: Any, default: Any) -> Any:
    """Does what `next` does, but returns a list of tensors."""
    try:
        return tf.raw_ops.IteratorGetNext(
            iterator=iterator._iterator_resource,
            output_types=iterator._flat_output_types,
            output_shapes=iterator._flat_output_shapes,
        )
    except tf.errors.OutOfRangeError:
        return default


def launcher(concrete: Any) -> Callable[[list[Any]], Any]:
    """Returns a function that calls a traced step with a list of tensors."""
    return lambda tensors: concrete._call_flat(tensors, concrete.captured_inputs)


@functools.cache
def is_known() -> bool:
    """Whether this TensorFlow is one whose functions `next_tensors` and `launcher` can do without."""
    try:
        return all(fingerprint(getattr(*find(target))) == known for target, known in _KNOWN.items())
    except (OSError, TypeError, ImportError, AttributeError):
        return False


def _end_of(outputs: Any) -> Callable[[], Any]:
    """Returns a function that waits for the step with these outputs."""
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    if not leaves or not isinstance(leaves[0], tf.Tensor):
        return tf.test.experimental.sync_devices
    # One number of a large prediction arrives with the rest. It is copied because two threads must not read a tensor at
    # the same time, and the main thread may be reading this one.
    number = tf.identity(leaves[0]) if leaves[0].shape.rank == 0 else tf.reshape(leaves[0], [-1])[:1]
    return number.numpy
