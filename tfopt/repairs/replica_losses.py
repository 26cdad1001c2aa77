"""`replica_losses`: losses of your own that several replicas would weigh or log wrongly.

Keras divides a loss by the number of replicas, since it sums their gradients. It is repaired or refused where that goes
wrong: a loss, or a term of one (D24), that is not divided, one that is logged divided, a sum that is divided (D25), and
losses that are more than a mean over examples.
"""

import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.graphs import FuncGraph
from tfopt.internals.training import unscale_loss_for_distribution
from tfopt.model.loss_terms import DIVIDED, SUMMED, UNDIVIDED, Terms, depends_on, update_without
from tfopt.repairs.probes import on_replicas
from tfopt.repairs.repair import Function, Repair, in_several_replicas, is_alone

_LOSS = "keras.src.losses.loss"
_AVERAGES = "tensorflow.python.ops.nn_impl_distribute"
_TRAINER = "keras.src.trainers.trainer:Trainer"
_TENSORFLOW_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
_MEAN = "keras.src.metrics.reduction_metrics:Mean"
_OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
_SCALING_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_GRADIENT = "tensorflow.python.eager.backprop:GradientTape.gradient"
_STRATEGIES = "tensorflow.python.distribute.distribute_lib"
_PROBED = "_tfopt_probed"  # an attribute of models: the losses that were probed
_EXAMPLES, _NEAR = 8, 1e-3  # of a probe; relative difference of two losses that count as the same


@dataclass(slots=True)
class _Step:
    """What a replica's step has done while it is traced."""

    model: Any
    data: Any
    """Its batch."""
    rehearses: bool = False
    """Whether it is only traced, and updates nothing."""
    divided: list[Any] = field(default_factory=list)
    """Losses divided by the number of replicas."""
    multiplied: list[Any] = field(default_factory=list)
    """Losses that Keras has multiplied by it again, to log them."""
    shared: list[Any] = field(default_factory=list)
    """Tensors reduced over the replicas."""
    summed: list[Any] = field(default_factory=list)
    """Losses divided by the sum of all replicas' sample weights; None for one that is meant to be summed."""
    added: list[Any] = field(default_factory=list)
    """Losses that layers add."""
    gradients: list[tuple[list[Any], list[Any], list[Any]]] = field(default_factory=list)
    """What was differentiated, the variables for which, and the gradients; in graphs only."""
    applied: list[Any] = field(default_factory=list)
    """Gradients that were given to an optimizer."""
    asks: bool = False
    """Whether the user's code has asked for the number of replicas."""
    updates: bool = False
    """Whether it updates weights."""

    def terms(self, weights: Sequence[Any], replicas: int | None) -> Terms:
        """Returns what to judge its losses by, as functions of weights; see `Terms` for the number of replicas."""
        kinds = ((DIVIDED, self.divided), (SUMMED, self.summed), (UNDIVIDED, self.multiplied))
        known = [(loss, kind) for kind, losses in kinds for loss in losses if loss is not None]
        shapes: list[Any] = [getattr(part, "shape", ()) for part in keras.tree.flatten(self.data)]
        examples = next((shape[0] for shape in shapes if shape != ()), None)
        return Terms(known, self.shared, weights=weights, examples=examples, replicas=replicas)

    def divides(self, value: Any) -> bool:
        """Whether a scalar is this replica's part of a loss, to be logged."""
        if not tf.is_tensor(value) or not hasattr(value, "graph"):
            return any(value is known for known in self.divided)
        if value.shape.rank:
            return False
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        terms = self.terms(self.model.trainable_variables, replicas).of(value)
        return bool(terms) and UNDIVIDED not in terms


_here = threading.local()


def _step() -> _Step | None:
    return getattr(_here, "step", None)


def _watching(original: Function) -> Function:
    def _make_function(self: Any, step_function: Function) -> Function:
        rehearsed: list[Any] = []

        def step(data: Any) -> Any:
            if not in_several_replicas():
                return step_function(data)
            if tf.executing_eagerly() and not rehearsed:
                rehearsed.append(_rehearse(self, step_function, data))
            with _traced(self, data) as found:
                outputs = step_function(data)
                if not any(rehearsed):
                    _require_divided(found)
                return keras.tree.map_structure(_whole, outputs)

        return original(self, step)

    return _make_function


@contextmanager
def _traced(model: Any, data: Any, rehearses: bool = False) -> Iterator[_Step]:
    before, _here.step = _step(), _Step(model, data, rehearses)
    try:
        yield _here.step
    finally:
        _here.step = before


def _rehearse(model: Any, step_function: Function, data: Any) -> bool:
    """Traces an eager step in a graph that never runs, since only a graph says what a loss is made of."""
    with _traced(model, data, rehearses=True) as found:
        with FuncGraph("rehearsal").as_default(), suppress(Exception):  # what works eagerly only is not judged
            step_function(
                keras.tree.map_structure(
                    lambda part: tf.compat.v1.placeholder(part.dtype, part.shape) if tf.is_tensor(part) else part, data
                )
            )
        if found.gradients:
            _require_divided(found)
    return bool(found.gradients)


def _require_divided(step: _Step) -> None:
    """Refuses a step of which a loss is not divided by the number of replicas, or is a sum and divided."""
    if not step.updates or is_alone():
        return
    if not (step.gradients or step.divided or step.summed):
        raise _undivided(step.model)
    replicas = step.model.distribute_strategy.num_replicas_in_sync if step.asks else None
    terms = step.terms(step.model.trainable_variables, replicas)
    if any(SUMMED in terms.of(loss) for loss in step.added if hasattr(loss, "graph")):
        raise _added_sum(step.model)
    for targets, weights, gradients in step.gradients:
        terms = step.terms(weights, replicas)
        wrong = [target for target in targets if UNDIVIDED in terms.of(target)]
        others = [target for others, _, found in step.gradients if found is not gradients for target in others]
        noted = [part for *_, found in step.gradients for part in found]  # some only for other losses or logs
        if wrong and not depends_on(others, gradients) and not update_without(gradients, step.applied, noted):
            raise _undivided(step.model, f" ({terms.undivided_at(wrong[0])})")


def _undivided(model: Any, where: str = "") -> UnsupportedError:
    replicas = model.distribute_strategy.num_replicas_in_sync
    return UnsupportedError(
        f"Expected {type(model).__name__} to divide each term of its loss by the number of replicas, {replicas}, since "
        "their gradients are summed. Found: a train_step or compute_loss that computes a term, or a function of a "
        f"divided one, by itself{where}: its gradients would be too large. What to do: compute a term with a "
        "keras.losses.Loss or, if it is a mean over a replica's examples or depends on weights alone, use "
        "tf.nn.scale_regularization_loss(term), which divides it; train on one device if a function of the whole "
        "loss, such as its logarithm, must be taken."
    )


def _whole(value: Any) -> Any:
    step = _step()
    return unscale_loss_for_distribution(value) if step is not None and step.divides(value) else value


def _logging_whole(original: Function) -> Function:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        return original(self, _whole(values), sample_weight)

    return update_state


def _noting(kind: str, original: Function) -> Function:
    def noting(*args: Any, **kwargs: Any) -> Any:
        value, step = original(*args, **kwargs), _step()
        if step is not None:
            getattr(step, kind).extend(keras.tree.flatten(value))
        return value

    return noting


def _noting_sums(original: Function) -> Function:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        loss, step = original(values, sample_weight, reduction), _step()
        weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
        if step is not None and (weighted or reduction in (None, "none", "sum")):
            step.summed.append(loss if weighted else None)
        return loss

    return reduce_values


def _noting_added(original: Function) -> Function:
    def _aggregate_additional_loss(self: Any, loss: Any) -> Any:
        step = _step()
        if step is not None:
            step.added.append(loss)
        return original(self, loss)

    return _aggregate_additional_loss


def _noting_gradients(original: Function) -> Function:
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        gradients, step = original(self, target, sources, *args, **kwargs), _step()
        if step is not None and not args and kwargs.get("output_gradients") is None:
            parts = [[part for part in keras.tree.flatten(value) if part is not None] for value in (target, gradients)]
            targets, weights = [part for part in parts[0] if hasattr(part, "graph")], keras.tree.flatten(sources)
            if targets and all(hasattr(weight, "handle") for weight in weights):
                step.gradients.append((targets, weights, parts[1]))
        return gradients

    return gradient


def _noting_questions(original: Function) -> Function:
    def num_replicas_in_sync(self: Any) -> int:
        step = _step()
        if step is not None and not sys._getframe(1).f_globals["__name__"].startswith(
            ("keras.", "tensorflow.", "tfopt.")
        ):
            step.asks = True
        return original(self)

    return num_replicas_in_sync


def note_update(grads: Iterable[Any]) -> bool:
    """Notes that the step being traced updates weights; returns whether it only rehearses, and must not."""
    step = _step()
    if step is not None:
        step.updates = True
        step.applied.extend(part for part in grads if part is not None)
    return step is not None and step.rehearses


def _noting_updates(original: Function) -> Function:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        if not note_update(grads := list(grads)):
            original(self, grads, trainable_variables)

    return apply


def _probing(original: Function) -> Function:
    def _symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        original(self, iterator=iterator, data_batch=data_batch)
        compiled = self._compile_loss
        if data_batch is None or compiled is None or self.__dict__.get(_PROBED) is compiled:
            return
        self.__dict__[_PROBED] = compiled
        if self.distribute_strategy.num_replicas_in_sync > 1:
            _probe(self, data_batch)

    return _symbolic_build


def _probe(model: Any, batch: Any) -> None:
    """Computes the losses of a few examples at once and in halves, and refuses those that are then others."""
    leaves = [part for part in keras.tree.flatten(batch) if part is not None]
    if not all(hasattr(part, "shape") and len(part.shape) for part in leaves):
        return
    size = min(len(leaves[0]), _EXAMPLES) // 2
    if not size:
        return
    parts = [
        keras.tree.map_structure(
            lambda leaf, part=part: None if leaf is None else tf.convert_to_tensor(leaf[part]), batch
        )
        for part in (slice(2 * size), slice(2 * size), slice(size), slice(size, 2 * size))
    ]
    state = [(variable, variable.numpy()) for variable in model.non_trainable_variables]
    try:
        added, called = zip(*[_losses(model, part) for part in parts], strict=True)
    except Exception:  # noqa: BLE001  the model does not work outside a step; what it computes there is unknown
        return
    finally:
        for variable, value in state:
            variable.assign(value)
        model.reset_metrics()
    _refuse_sums(model, added)
    for loss, y_true, y_pred in called[0]:
        _refuse_pairs(loss, y_true, y_pred, size)


def _losses(model: Any, batch: Any) -> tuple[list[float], list[tuple[Any, Any, Any]]]:
    """What layers add to the loss, and each compiled loss with its arguments."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    y_pred = model(x, training=False)
    added = [float(tf.reduce_sum(loss)) for loss in model.losses]
    _here.calls = []
    try:
        model._compile_loss(y, y_pred)
        return added, _here.calls
    finally:
        _here.calls = None


def _recording(original: Function) -> Function:
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        calls = getattr(_here, "calls", None)
        if calls is not None:
            calls.append((self, y_true, y_pred))
        return original(self, y_true, y_pred, sample_weight)

    return call


def _refuse_sums(model: Any, added: Sequence[list[float]]) -> None:
    """Refuses a loss that doubles with the examples."""
    whole, again, first, second = map(np.asarray, added)
    if not len(whole) == len(again) == len(first) == len(second):
        return
    doubles = np.isclose(whole, first + second, rtol=_NEAR) & ~np.isclose(whole, (first + second) / 2, rtol=_NEAR)
    if np.any(doubles & (whole == again)):
        raise _added_sum(model)


def _added_sum(model: Any) -> UnsupportedError:
    layers = [repr(layer.name) for layer in model._flatten_layers() if getattr(layer, "_losses", None)]
    return UnsupportedError(
        "Expected add_loss with a mean over the examples, as Keras combines it over replicas. Found: a sum, or a "
        f"loss for each example, in {', '.join(layers)}: its gradient would be too small by the number of "
        "replicas. What to do: add its mean over the examples, with a larger weight if need be."
    )


def _refuse_pairs(loss: Any, y_true: Any, y_pred: Any, size: int) -> None:
    """Refuses a loss that gives an example another value among other examples."""

    def values(of: slice) -> Any:
        arguments = [keras.tree.map_structure(lambda part: part[of], part) for part in (y_true, y_pred)]
        return np.asarray(loss.call(*arguments))

    whole, again = values(slice(2 * size)), values(slice(2 * size))
    if not whole.shape or len(whole) != 2 * size or not np.array_equal(whole, again):
        return
    halves = np.concatenate([values(slice(size)), values(slice(size, 2 * size))])
    if not np.allclose(whole, halves, rtol=_NEAR, atol=_NEAR * float(np.abs(whole).max())):
        raise UnsupportedError(
            "Expected a loss of each example by itself, since each replica sees only its part of a batch. Found: "
            f"{type(loss).__name__} ({loss.name!r}), which compares the examples of a batch with each other. What to "
            "do: train on one device, or gather the replicas' predictions in a train_step of your own."
        )


REPLICA_LOSSES = Repair(
    name="replica_losses",
    defect=(
        "Under a tf.distribute strategy with several replicas, a loss, or a term of one, that a train_step or "
        "compute_loss computes by itself has gradients too large by the number of replicas; what a train_step logs, "
        "and sums in add_loss, are too small by it; and losses that compare examples see only those of a replica."
    ),
    reference="Keras, scale_loss_for_distribution in keras/src/losses/loss.py; no upstream report was found.",
    broken={
        f"{_TENSORFLOW_TRAINER}._make_function": frozenset({"703051878417df76"}),
        f"{_TRAINER}._symbolic_build": frozenset({"949741cb25aee9e4", "c43cd90843d7dd72"}),
        f"{_LOSS}:Loss.__call__": frozenset({"90f470ab3f051183"}),
        f"{_LOSS}:scale_loss_for_distribution": frozenset({"d51ce2890a926a77"}),
        f"{_LOSS}:unscale_loss_for_distribution": frozenset({"7d7ba58a65159a39"}),
        f"{_LOSS}:reduce_values": frozenset({"426eafe27d1d3164"}),
        f"{_AVERAGES}:compute_average_loss": frozenset({"720ed23d691ef974"}),
        f"{_AVERAGES}:scale_regularization_loss": frozenset({"6cac27fd8ba10ac2"}),
        f"{_MEAN}.update_state": frozenset({"131afaa19cbd7a6d"}),
        f"{_TENSORFLOW_TRAINER}._aggregate_additional_loss": frozenset({"19cc9c02e41735d5"}),
        f"{_OPTIMIZER}.apply": frozenset({"4634947582aff41e"}),
        f"{_SCALING_OPTIMIZER}.apply": frozenset({"d9ab44f3671faadc"}),
        _GRADIENT: frozenset({"1cc6d3141d359b16"}),
        f"{_STRATEGIES}:StrategyBase.num_replicas_in_sync": frozenset({"c71be4ca4f7f2c36"}),
        f"{_STRATEGIES}:ReplicaContextBase.num_replicas_in_sync": frozenset({"45c99f38619fb780"}),
        f"{_STRATEGIES}:ReplicaContextBase.all_reduce": frozenset({"ee36dfdc2e8c3bcb"}),
    },
    replace={
        f"{_TENSORFLOW_TRAINER}._make_function": _watching,
        f"{_TRAINER}._symbolic_build": _probing,
        f"{_LOSS}:Loss.__call__": _recording,
        f"{_LOSS}:scale_loss_for_distribution": functools.partial(_noting, "divided"),
        f"{_LOSS}:unscale_loss_for_distribution": functools.partial(_noting, "multiplied"),
        f"{_LOSS}:reduce_values": _noting_sums,
        f"{_AVERAGES}:compute_average_loss": functools.partial(_noting, "divided"),
        f"{_AVERAGES}:scale_regularization_loss": functools.partial(_noting, "divided"),
        f"{_MEAN}.update_state": _logging_whole,
        f"{_TENSORFLOW_TRAINER}._aggregate_additional_loss": _noting_added,
        f"{_OPTIMIZER}.apply": _noting_updates,
        f"{_SCALING_OPTIMIZER}.apply": _noting_updates,
        _GRADIENT: _noting_gradients,
        f"{_STRATEGIES}:StrategyBase.num_replicas_in_sync": _noting_questions,
        f"{_STRATEGIES}:ReplicaContextBase.num_replicas_in_sync": _noting_questions,
        f"{_STRATEGIES}:ReplicaContextBase.all_reduce": functools.partial(_noting, "shared"),
    },
    on_top=True,
    probe=on_replicas("REPLICA_LOSSES", "own_terms", [-1.0, -8.0], refuses=True),
    without="Return keras.losses.Loss objects' values from compute_loss, and add_loss means only.",
)
