"""Rounds of accumulation: several batches, whose mean gradient the optimizer gets as if they had been one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.batch.loss_reduction import averages
from tfopt.errors import UnsupportedError
from tfopt.repairs.optimizers import ROUNDS, Reduction, reductions_noted
from tfopt.repairs.repair import in_several_replicas, is_alone, trains_together
from tfopt.repairs.replica_losses import note_update

_thread = threading.local()  # the batch that this thread trains on


class Rounds:
    """Takes the gradients of each batch, and lets an optimizer update with their mean once a round is full.

    The optimizer may be a LossScaleOptimizer. It gets the mean of scaled gradients, which is not finite if one of them
    is not: it then skips the whole update, as it would for one large batch.

    Args:
        optimizer: The model's optimizer.
        steps: Batches in a round.
    """

    def __init__(self, optimizer: Any, steps: int):
        self.optimizer, self.steps = optimizer, steps
        self.own_apply: Any = vars(optimizer).get("apply")
        """An `apply` that the user has set on the optimizer; it gets the means."""
        self._strategy = optimizer._distribution_strategy
        self._batches = self._variable(tf.zeros((), tf.int64))  # of the open round
        self._weights = self._variable(tf.zeros(2, tf.float64))  # of all of them; sums of sample weights need the bits
        self._apart = self._variable(tf.zeros((), tf.int64))  # 1 if losses disagreed about a batch's share
        self._means: dict[str, tf.Variable] = {}
        self._variables: list[Any] = []
        self._exist: list[bool] = []  # gradients of them
        self._end: Any = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Does what the optimizer's `apply` does, but updates with the mean of a round at its end."""
        if vars(self.optimizer).get(ROUNDS) is not self:  # switched off, but the user's own apply still calls this
            self._apply(grads, trainable_variables)
            return
        batch: Batch | None = getattr(_thread, "batch", None)
        if batch is None:
            raise UnsupportedError(
                "Expected gradients from the train_step that tfopt.batch.accumulate set up. Found: optimizer.apply "
                "called elsewhere: by a loop of your own, a train_step set since, or another model with this "
                "optimizer. Call tfopt.batch.accumulate(model, 1) first, or give the other model its own optimizer."
            )
        weights = batch.count_update()
        grads = list(grads)
        if note_update(grads):
            return
        variables = list(trainable_variables or self.optimizer._trainable_variables)
        self._prepare(grads, variables)
        first = tf.equal(self._batches, 0)
        totals = tf.where(first, tf.zeros_like(weights), self._weights) + weights
        shares = tf.math.divide_no_nan(weights, totals)
        apart, share = tf.cast(shares[0] != shares[1], tf.int64), shares[0]
        kept_share = tf.where(first, tf.zeros_like(share), 1 - share)
        for gradient, variable in zip(grads, variables, strict=True):
            if gradient is not None:
                self._add(gradient, variable, share, kept_share)
        done = self._batches + 1
        full = tf.equal(done, self.steps)
        self._weights.assign(totals)
        self._apart.assign(tf.maximum(self._apart, apart))
        self._batches.assign(tf.where(full, tf.zeros_like(done), done))
        if trains_together():
            # All replicas must enter the branch that synchronises together, so it is outside the replica context.
            tf.distribute.get_replica_context().merge_call(self._update_all_if, args=(full,))
        else:
            tf.cond(full, self._update, lambda: None)

    def end(self) -> None:
        """Ends an open round: updates with the mean of the batches that it has.

        Raises:
            tfopt.errors.UnsupportedError: If the batches had other shares in one loss than in another.
        """
        if int(self._strategy.experimental_local_results(self._apart)[0]):
            self.drop()
            raise UnsupportedError(
                "Expected losses that all divide by the same number in a batch, or by a multiple of it. Found: losses "
                "in which the batches of a round weigh differently, such as one per node and one per graph. The "
                "updates until now were wrong. Train without accumulation, with larger batches, or with one loss."
            )
        if not int(self._strategy.experimental_local_results(self._batches)[0]):
            return
        if self._end is None:

            def update() -> None:
                self._update()
                self._batches.assign(0)

            self._end = tf.function(lambda: self._strategy.run(update), autograph=False)
        self._end()

    def drop(self) -> None:
        """Forgets the batches of an open round."""
        for variable in (self._batches, self._apart):
            for part in self._strategy.experimental_local_results(variable):
                part.assign(0)

    def _prepare(self, grads: list[Any], variables: list[Any]) -> None:
        """Creates what the update needs, which it cannot inside a branch, nor XLA at all."""
        self._variables, self._exist = variables, [gradient is not None for gradient in grads]

        def create(_: Any = None) -> None:
            with tf.init_scope(), self._strategy.scope():
                if not self.optimizer.built:
                    self.optimizer.build(variables)
                for variable, exists in zip(variables, self._exist, strict=True):
                    if exists and self._key(variable) not in self._means:
                        self._means[self._key(variable)] = self._variable(
                            tf.zeros(variable.shape, _wide(variable.dtype))
                        )

        if trains_together():
            tf.distribute.get_replica_context().merge_call(create)
        else:
            create()

    def _variable(self, value: Any) -> tf.Variable:
        """A variable of which each replica has its own."""
        with self._strategy.scope():
            return tf.Variable(
                value,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    def _key(self, variable: Any) -> str:
        return self.optimizer._var_key(variable)

    def _add(self, gradient: Any, variable: Any, share: tf.Tensor, kept_share: tf.Tensor) -> None:
        mean = self._means[self._key(variable)]
        gradient = tf.cast(tf.convert_to_tensor(gradient), mean.dtype)
        # Even of NaN a factor of 0 keeps nothing: a new round forgets an overflow.
        before = tf.math.multiply_no_nan(mean.read_value(), tf.cast(kept_share, mean.dtype))
        if self.optimizer._overwrite_variable_with_gradient(variable):  # float8: the largest value so far
            mean.assign(tf.maximum(before, gradient))
        else:
            mean.assign(before + gradient * tf.cast(share, mean.dtype))

    def _update_all_if(self, strategy: Any, full: Any) -> None:
        everywhere = strategy.experimental_local_results(full)[0]
        tf.cond(everywhere, lambda: strategy.extended.call_for_each_replica(self._update), lambda: None)

    def _update(self) -> None:
        means = [
            _read(self._means[self._key(variable)], variable.dtype) if exists else None
            for variable, exists in zip(self._variables, self._exist, strict=True)
        ]
        self._apply(means, self._variables)

    def _apply(self, grads: Any, variables: Any) -> None:
        if self.own_apply is None:
            type(self.optimizer).apply(self.optimizer, grads, variables)
        else:
            self.own_apply(grads, variables)


def _read(variable: Any, dtype: Any) -> tf.Tensor:
    value = variable.read_value()
    with tf.device(variable.device):  # inside a branch a tensor has no device, and the all-reduce needs one
        return tf.cast(tf.identity(value), dtype)


def _wide(dtype: Any) -> str:
    name = keras.backend.standardize_dtype(dtype)
    return "float32" if name in ("float16", "bfloat16") else name


class Batch:
    """What a batch weighs in the mean of its round: what its loss divides by.

    Args:
        model: The model.
        data: The batch (x, y[, sample_weight]), or this replica's part of it.
        reductions: How the losses of the batch were reduced, as they are computed.
    """

    def __init__(self, model: Any, data: Any, reductions: list[Reduction]):
        self._model, self._data, self._reductions = model, data, reductions
        self.updates = 0
        """How often the optimizer was given its gradients."""

    def count_update(self) -> tf.Tensor:
        """Counts an update, and returns what the batch weighs over all replicas: in its first loss, and in all."""
        self.updates += 1
        if self.updates > 1:
            raise UnsupportedError(
                f"Expected one optimizer.apply per batch, to accumulate its gradients. Found: the train_step of "
                f"{self._model.name!r} calls it twice, or in a tf.function of its own, which is traced twice. Add the "
                "gradients up and apply them once, without tf.function."
            )
        if in_several_replicas() and is_alone():
            raise UnsupportedError(
                "Expected replicas that update together. Found: LocalSteps along with tfopt.batch.accumulate. "
                "Use one of them: LocalSteps saves the communication that accumulation saves."
            )
        self._require_means()
        weights = self._weights()
        return _over_replicas(tf.stack([weights[0], sum(weights)]))

    def _weights(self) -> list[tf.Tensor]:
        """What each loss divides by, or what is in proportion to it."""
        others = [reduction for reduction in self._reductions if reduction.kind != "examples"]
        added = any(layer._losses for layer in self._model._flatten_layers())
        if others and (added or len(self._reductions) > 1):
            raise UnsupportedError(
                f"Expected losses that are all means over the examples, or only one loss. Found: one that divides by "
                f"{'its mask' if others[0].kind == 'mask' else 'its sample weights'}, and "
                f"{'one that a layer adds' if added else 'another one'}: the batches weigh differently in each. "
                "Leave out the mask or the added loss, or train with larger batches."
            )
        if others:
            return [tf.reduce_sum(tf.cast(others[0].divisor, tf.float64))]
        averaged = [self._averaged(reduction.divisor) for reduction in self._reductions]
        if len(averaged) == 1 and not added:
            return [tf.cast(tf.size(averaged[0]), tf.float64)]
        averaged += [self._averaged(None)] if added or not averaged else []
        return [tf.cast(tf.shape(part)[0], tf.float64) for part in averaged]

    def _averaged(self, values: Any) -> Any:
        """What was averaged, if it can be read here, or else the first part of the batch that has examples."""
        inside = getattr(values, "graph", None) not in (None, tf.compat.v1.get_default_graph())
        if values is not None and not inside:
            return values
        parts = [part for part in keras.tree.flatten(self._data) if getattr(part, "shape", ()) != ()]
        return parts[0] if parts else tf.zeros(1)

    def _require_means(self) -> None:
        kinds = {reduction.kind for reduction in self._reductions}
        if "sum" in kinds:
            raise UnsupportedError(
                "Expected a loss that is a mean over the examples. Found: a sum, reduction='sum' or None, which would "
                "be divided by the number of batches. Use reduction='sum_over_batch_size' and a larger learning rate."
            )
        for loss, y_true, y_pred in (reduction.call for reduction in self._reductions if reduction.call is not None):
            if not averages(loss, y_true, y_pred):
                raise UnsupportedError(
                    f"Expected a loss that is a mean over the examples. Found: {loss.name}, which is computed from all "
                    "examples of a batch together, or is a sum over them. Choose another loss (an axis without the "
                    "examples, or a mean), or train with larger batches."
                )
        if "product" in kinds:
            raise UnsupportedError(
                "Expected a loss per example, or no sample weights. Found: a loss function that returns one number, "
                "which Keras multiplies by the mean sample weight of the batch. Return a loss per example, such as "
                "ops.mean((y - y_pred) ** 2, axis=-1)."
            )


def _over_replicas(value: Any) -> tf.Tensor:
    if not trains_together():
        return value
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


@contextmanager
def training_on(model: Any, data: Any) -> Iterator[Batch]:
    """Lets this thread's `Rounds.apply` know the batch whose gradients it gets."""
    before = getattr(_thread, "batch", None)
    with reductions_noted() as reductions:
        _thread.batch = Batch(model, data, reductions)
        try:
            yield _thread.batch
        finally:
            _thread.batch = before
