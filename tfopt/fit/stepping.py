"""A model's train or test function that launches a step and returns."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfopt.fit.direct import has_direct_way, launch_directly, take_directly
from tfopt.fit.input import StagedIterator
from tfopt.fit.logs import is_settled

if TYPE_CHECKING:
    from tfopt.fit.settings import Overlap

_END = object()


class OverlappedStep:
    """Keras' train or test function, with the batch taken before the step and not inside it.

    The step itself is Keras' own. Its batch is taken eagerly: when the data ends, nothing of the step has run (inside
    a graph, what does not depend on the batch has, so that Keras counts a step too many where it does not know how many
    there are), and calling the step costs a call of one graph, not of two and a comparison.

    Args:
        stock: What Keras' `_make_function` returned.
        model: The model.
        overlap: Its overlap.
    """

    def __init__(self, stock: Callable[[Any], Any], model: keras.Model, overlap: "Overlap"):
        self.stock = stock
        self._model = model
        self.overlap = overlap
        self._one_step = inspect.getclosurevars(stock).nonlocals["one_step_on_data"]
        # How batches of a spec are taken, and a step on them launched.
        self._spec: Any = None
        self._kind: Any = None
        self._take: Callable[..., Any] = next
        self._launch: Callable[[Any], Any] = self._one_step

    def __call__(self, iterator: Any) -> Any:
        """Launches the steps of one execution; arguments and result as those of Keras' function."""
        if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator | StagedIterator):
            return self.stock(iterator)  # train_on_batch's generator
        self._prepare(iterator)
        steps = self._model.steps_per_execution
        batch = self._take(iterator, _END)
        if batch is _END:  # as Keras' function, for whoever calls it in a loop of their own
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") if steps == 1 else StopIteration
        outputs = self._run(batch)
        for _ in range(steps - 1):
            batch = self._take(iterator, _END)
            if batch is _END:
                break
            outputs = self._run(batch)
        if is_settled(outputs):
            return outputs
        # An eager step may return variables, which the next step changes. Keras' function hands its outputs on in an
        # Optional, which makes tensors of variables, numbers and lists.
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
        self._take, self._launch, self._kind = next, self._one_step, None  # what follows may fail
        # Whether it is a graph was decided when it was made, and not by what model.run_eagerly is by now.
        if not eager and isinstance(self._one_step.__wrapped__, tf.types.experimental.PolymorphicFunction):
            concrete, whole = self._trace(spec)
            self._launch = concrete if whole else self._model._autoconvert_optionals(concrete)
            if has_direct_way(iterator):
                self._take, self._launch = take_directly, launch_directly(concrete)
        self._spec, self._kind = spec, kind

    def _trace(self, spec: Any) -> tuple[Any, bool]:
        """The step for batches of a spec, and whether they lack no part.

        By the spec, not by the first batch: a smaller last one would be traced, and compiled, anew.
        """
        leaves = keras.tree.flatten(spec)
        missing = [isinstance(leaf, tf.OptionalSpec) for leaf in leaves]
        if any(missing):
            parts = [None if absent else leaf for leaf, absent in zip(leaves, missing, strict=True)]
            spec = keras.tree.pack_sequence_as(spec, parts)
        return self._one_step.__wrapped__.get_concrete_function(spec), not any(missing)
