"""Defects of Keras' optimizers in clipping and accumulating gradients, and in their first step.

- D3, `clipping`: each replica clips its gradients before they are summed.
- D6, `accumulation`: learning-rate schedules advance too fast, batches left over at an epoch's end carry over, and
  several replicas fail. It also ends or drops the rounds of `tfopt.batch.accumulate`, and notes how losses average.
- D23, `schedule_free`: ScheduleFreeAdamW begins at zero instead of at the model's weights.
"""

import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.training import BaseOptimizer
from tfopt.model.step_calls import NOT_OF_THE_STEP
from tfopt.repairs.probes import on_one_device, on_replicas
from tfopt.repairs.repair import Function, Repair, trains_together

_BASE = "keras.src.optimizers.base_optimizer:BaseOptimizer"
_TENSORFLOW = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
_SCHEDULE_FREE = "keras.src.optimizers.schedule_free_adamw:ScheduleFreeAdamW"
_LOSS = "keras.src.losses.loss"
_UPDATED = "_tfopt_updated"  # an attribute of optimizers: the variables that have gradients
ROUNDS = "_tfopt_rounds"
"""The attribute of an optimizer under which `tfopt.batch.accumulate`, floors above, keeps its `Rounds`."""


def _later(original: Function) -> Function:
    def _clip_gradients(self: Any, grads: Any) -> Any:
        return grads if trains_together() else original(self, grads)

    return _clip_gradients


def _then_clipped(original: Function) -> Function:
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return clip_sum(self, original(self, grads_and_vars))

    return _all_reduce_sum_gradients


def clip_sum(optimizer: Any, reduced: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Clips gradients summed over the replicas as the optimizer is set; a single replica has clipped already."""
    reduced = list(reduced)
    if not trains_together():
        return reduced
    clipped = inspect.unwrap(BaseOptimizer._clip_gradients)(optimizer, [gradient for gradient, _ in reduced])
    return [(gradient, variable) for gradient, (_, variable) in zip(clipped, reduced, strict=True)]


CLIPPING = Repair(
    name="clipping",
    defect=(
        "Under a tf.distribute strategy with several replicas, clipnorm, global_clipnorm and clipvalue act on each "
        "replica's gradients before they are summed: the update differs from a single device's."
    ),
    reference="Keras, BaseOptimizer._backend_apply_gradients; no upstream report was found.",
    broken={
        f"{_BASE}._backend_apply_gradients": frozenset({"911dfbb4fb47a126"}),
        f"{_BASE}._clip_gradients": frozenset({"2959288b42bbb415"}),
        f"{_TENSORFLOW}._backend_update_step": frozenset({"9117333b6dd23978"}),
        f"{_TENSORFLOW}._all_reduce_sum_gradients": frozenset({"33492b4c7a2a499e", "e07c98158f76084a"}),
    },
    replace={
        f"{_BASE}._clip_gradients": _later,
        f"{_TENSORFLOW}._all_reduce_sum_gradients": _then_clipped,
    },
    probe=on_replicas("CLIPPING", "clipped", 1.0, 1e-4),
    without="Do not clip gradients, or train on a single replica.",
)


def _counting_updates(original: Function) -> Function:
    def _get_current_learning_rate(self: Any) -> Any:
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return self._learning_rate(self.iterations)  # counts updates; self._iterations counts batches
        return original(self)

    return _get_current_learning_rate


def _deciding_for_all_replicas(original: Function) -> Function:
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        if self.use_ema and self.ema_overwrite_frequency and trains_together():
            raise UnsupportedError(
                "Expected an optimizer whose weights each replica can set by itself. Found: "
                f"ema_overwrite_frequency={self.ema_overwrite_frequency}, for which replicas would have to synchronise "
                "inside a condition. Leave it out; the averages are then applied at the end of fit."
            )
        self.__dict__[_UPDATED] = list(trainable_variables)  # out of sight of Keras' attribute tracking
        if not self.gradient_accumulation_steps or not trains_together():
            original(self, grads, trainable_variables)
            return
        # All replicas must enter the branch that synchronises together, so it is outside the replica context.
        tf.distribute.get_replica_context().merge_call(
            _accumulate_or_update, args=(self, list(grads), list(trainable_variables))
        )
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)

    return _backend_apply_gradients


def _accumulate_or_update(strategy: Any, optimizer: Any, grads: Any, variables: Any) -> None:
    """Adds each replica's gradients to its own sums, and updates with all sums once a round is full."""
    steps = optimizer.gradient_accumulation_steps
    variables = [strategy.experimental_local_results(variable)[0] for variable in variables]
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(variable)].value for variable in variables]

    def each(function: Function) -> None:
        for total, gradient in zip(sums, grads, strict=True):
            strategy.extended.update(total, function, args=(gradient,), group=False)

    def update() -> None:
        each(lambda total, gradient: total.assign((total + gradient) / steps))
        strategy.extended.call_for_each_replica(_update, args=(optimizer, variables, sums))
        each(lambda total, _: total.assign(tf.zeros_like(total)))

    full = tf.equal((optimizer._iterations.value + 1) % steps, 0)
    tf.cond(full, update, lambda: each(lambda total, gradient: total.assign_add(gradient)))


def _update(optimizer: Any, variables: Any, means: Any) -> None:
    grads = optimizer._clip_gradients([_read(mean) for mean in means])
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(grads, variables, optimizer.learning_rate)


def _read(variable: Any) -> Any:
    with tf.device(variable.device):  # inside a branch a tensor has no device, and the all-reduce needs one
        return tf.identity(variable)


def _ending_rounds(original: Function) -> Function:
    signature = inspect.signature(original)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        callbacks, ends = given.arguments.get("callbacks"), _EndOfRound()
        if isinstance(callbacks, keras.callbacks.CallbackList):
            ends.set_model(self)
            callbacks.callbacks.insert(0, ends)
        else:
            given.arguments["callbacks"] = [ends, *keras.tree.flatten(callbacks or [])]
        try:
            return original(*given.args, **given.kwargs)
        except BaseException:
            if (rounds := _rounds_of(self)) is not None:
                rounds.drop()
            raise
        finally:
            if isinstance(callbacks, keras.callbacks.CallbackList):
                callbacks.callbacks.remove(ends)

    return fit


class _EndOfRound(keras.callbacks.Callback):
    """Ends a round of accumulation with the epoch, before validation and before other callbacks save the weights."""

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        end_round(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        end_round(self.model)


def end_round(model: Any, apply: Function | None = None) -> None:
    """Updates with the mean of the gradients that are left over, if any, as if the round had been that short.

    Args:
        model: A model, whose optimizer may accumulate gradients.
        apply: What to call in each replica instead of the optimizer's `apply`.
    """
    if (accumulated := _rounds_of(model)) is not None:
        accumulated.end()
        return
    optimizer = _inner_optimizer(model)
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if not steps:
        return
    done = int(optimizer._iterations.numpy())
    rounds, left = divmod(done, steps)
    variables = optimizer.__dict__.get(_UPDATED)
    if not left or variables is None:
        return

    @tf.function(autograph=False)
    def update() -> None:
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
        model.distribute_strategy.run(apply or optimizer.apply, args=(zeros, variables))

    optimizer.gradient_accumulation_steps = left
    try:
        optimizer._iterations.assign(rounds * left + left - 1)  # as many rounds, and the next batch ends one
        update()
        done = (rounds + 1) * steps
    finally:
        optimizer.gradient_accumulation_steps = steps
        optimizer._iterations.assign(done)


def _rounds_of(model: Any) -> Any:
    return getattr(getattr(model, "optimizer", None), "__dict__", {}).get(ROUNDS)


def _inner_optimizer(model: Any) -> Any:
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


class Reduction(NamedTuple):
    """How a loss has made one number of its values."""

    kind: Literal["examples", "mask", "weights", "sum", "product"]
    """A mean over all values, over those a mask leaves or by sample weights; a sum; or one value times the mean of the
    sample weights."""
    divisor: Any = None
    """The mask, the sample weights, or else what has a value for each that was averaged; None if that is unknown."""
    call: tuple[Any, Any, Any] | None = None
    """The loss, its targets and its predictions."""


class _Values(NamedTuple):
    """What a loss reduces, before masks and weights multiply it."""

    values: Any
    is_weighted: bool = False
    mask: Any = None
    of_step: bool = True


_here = threading.local()  # where to note reductions in this thread, the loss called, and the values of the next one


@contextmanager
def reductions_noted() -> Iterator[list[Reduction]]:
    """Notes how the losses computed in the block are reduced, while the repair `accumulation` is installed."""
    before = getattr(_here, "noted", None)
    _here.noted = []
    try:
        yield _here.noted
    finally:
        _here.noted = before


def _noting_call(original: Function) -> Function:
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        before, _here.call = getattr(_here, "call", None), (self, y_true, y_pred)
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            _here.call = before

    return call


def _noting_values(original: Function) -> Function:
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        _here.values = _Values(values, sample_weight is not None, mask, not hasattr(values, NOT_OF_THE_STEP))
        return original(values, sample_weight, mask, reduction, dtype)

    return reduce_weighted_values


def _noting_reduction(original: Function) -> Function:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        given, _here.values = getattr(_here, "values", None) or _Values(values), None
        if getattr(_here, "noted", None) is not None and given.of_step:
            call = getattr(_here, "call", None)
            _here.noted.append(_reduction(given, sample_weight, reduction, call)._replace(call=call))
        return original(values, sample_weight, reduction)

    return reduce_values


def _reduction(given: _Values, sample_weight: Any, reduction: str | None, call: Any) -> Reduction:
    shape: Any = getattr(given.values, "shape", ())
    is_scalar = not len(shape)
    averaged = None if is_scalar else given.values
    # A target that is a number has no shape.
    of_targets: Any = () if call is None else getattr(keras.tree.flatten(call[1])[0], "shape", ())
    if call is not None and (is_scalar or (len(of_targets) and shape[0] != of_targets[0])):
        averaged = keras.tree.flatten(call[2])[0]  # the user's own function has taken the mean over the examples
    if is_scalar and sample_weight is None:
        return Reduction("examples", averaged)
    if reduction in (None, "none", "sum"):
        return Reduction("sum")
    if is_scalar:  # a mask leaves it as it is: Keras divides by what it multiplies with
        return Reduction("product" if given.is_weighted else "examples", averaged)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return Reduction("weights", sample_weight)
    return Reduction("examples", averaged) if given.mask is None else Reduction("mask", given.mask)


ACCUMULATION = Repair(
    name="accumulation",
    defect=(
        "gradient_accumulation_steps=N advances learning-rate schedules with each batch, N times too fast, and the "
        "batches left over at the end of an epoch carry into the next one and the next fit. Under a tf.distribute "
        "strategy with several replicas, fit fails."
    ),
    reference="keras#20582; no upstream report of the schedules was found.",
    broken={
        f"{_BASE}._get_current_learning_rate": frozenset({"a90d5cfe04f6c5c3"}),
        f"{_BASE}._backend_apply_gradients": frozenset({"911dfbb4fb47a126"}),
        f"{_TRAINER}.fit": frozenset({"c443656a13e238bb"}),
        f"{_LOSS}:Loss.__call__": frozenset({"90f470ab3f051183"}),
        f"{_LOSS}:reduce_weighted_values": frozenset({"01a515706e7b664e"}),
        f"{_LOSS}:reduce_values": frozenset({"426eafe27d1d3164"}),
    },
    replace={
        f"{_BASE}._get_current_learning_rate": _counting_updates,
        f"{_BASE}._backend_apply_gradients": _deciding_for_all_replicas,
        f"{_TRAINER}.fit": _ending_rounds,
        f"{_LOSS}:Loss.__call__": _noting_call,
        f"{_LOSS}:reduce_weighted_values": _noting_values,
        f"{_LOSS}:reduce_values": _noting_reduction,
    },
    probe=on_one_device("ACCUMULATION", "accumulated", [0.5, 4.0], 1e-6),
    without="Stretch the schedule N times and train on a single replica, or use larger batches.",
)


def _from_the_weights(original: Function) -> Function:
    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        start = self._momentums[self._get_variable_index(variable)]
        # At the first update, not in `build`: weights may be loaded after it, or made by the graph that is traced.
        self.assign(start, keras.ops.where(keras.ops.equal(self.iterations, 0), variable, start))
        original(self, gradient, variable, learning_rate)

    return update_step


SCHEDULE_FREE = Repair(
    name="schedule_free",
    defect=(
        "ScheduleFreeAdamW throws the model's weights away in its first step, unless it was built before the step is "
        "traced: it takes them for zero. Weights loaded after it was built are drawn back to those before."
    ),
    reference="Keras, ScheduleFreeAdamW.build; no upstream report was found.",
    broken={
        f"{_SCHEDULE_FREE}.build": frozenset({"e954a400f2aff741"}),
        f"{_SCHEDULE_FREE}.update_step": frozenset({"71c5a07910aead60"}),
    },
    replace={f"{_SCHEDULE_FREE}.update_step": _from_the_weights},
    found_in="optimizers.ScheduleFreeAdamW",
    probe=on_one_device("SCHEDULE_FREE", "first_steps", [1.001, 3.001], 1e-5),
    without="Call optimizer.build(model.trainable_variables) after the weights are set, before fit, or use AdamW.",
)


def repair_optimizer(model: Any) -> None:
    """Installs the repair that the optimizer of a model needs, if it needs one; raises as `Repair.install`."""
    if isinstance(_inner_optimizer(model), getattr(keras.optimizers, "ScheduleFreeAdamW", ())):
        SCHEDULE_FREE.install()
