"""A model's train or test function that launches a step and returns."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfopt.fit.direct import has_direct_way, launch_directly, take_directly
from tfopt.fit.input import StagedIterator
from tfopt.fit.logs import StepLogs

if TYPE_CHECKING:
    from tfopt.fit.settings import Overlap

_END = object()
_EAGER_TENSOR = type(tf.constant(0))


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
        self._overlap = overlap
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
        outputs = self._run(self._take(iterator))
        for _ in range(self._model.steps_per_execution - 1):
            batch = self._take(iterator, _END)
            if batch is _END:
                break
            outputs = self._run(batch)
        return StepLogs(outputs, self._overlap) if self._may_wait(outputs) else outputs

    def _run(self, batch: Any) -> Any:
        outputs = self._launch(batch)
        self._overlap.in_flight.launched(outputs)
        return outputs

    def _prepare(self, iterator: Any) -> None:
        spec, kind = iterator.element_spec, (type(iterator), tf.config.functions_run_eagerly())
        if kind == self._kind and (spec is self._spec or spec == self._spec):
            return
        self._take, self._launch = next, self._one_step
        if not self._model.run_eagerly and not tf.config.functions_run_eagerly():
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

    def _may_wait(self, outputs: Any) -> bool:
        """Whether the logs may be converted later. An eager step may return variables, which the next step changes."""
        if not isinstance(outputs, dict):
            return False
        return not self._model.run_eagerly or all(type(value) is _EAGER_TENSOR for value in outputs.values())
