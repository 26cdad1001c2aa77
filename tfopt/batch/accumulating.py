"""Gradient accumulation that computes what a larger batch would: switches it on and off for a model."""

from typing import Any

import keras
import tensorflow as tf

from tfopt import checks, repairs
from tfopt.batch.rounds import Rounds, training_on
from tfopt.errors import UnsupportedError
from tfopt.kernels.replacing import CALLS_OWN
from tfopt.model.layers import require_compiled
from tfopt.model.state import rebuild_step_function
from tfopt.repairs.optimizers import ROUNDS, end_round

_ATTRIBUTE = "_tfopt_accumulated"  # on models: what `accumulate` installed


def accumulate(model: keras.Model, steps: int) -> int:
    """Updates a model once for several batches, with the gradient that one batch of all their examples would have.

    Use it to train with a larger batch than fits into memory. The weights are those of the large batch up to rounding,
    with these differences: layers that look at a whole batch, such as BatchNormalization, see each batch separately,
    dropout draws different masks, and embeddings sum the gradients of an id before they are clipped or squared.

    A batch weighs what its loss divides by: examples, also in a smaller last batch; positions under a mask; nodes of
    graphs or tokens of packed rows; sample weights in a loss that divides by them. Clipping and loss scaling act on the
    mean gradient, and an overflow in one batch skips the whole update. An `optimizer.apply` that you have set gets that
    mean, once per update. Weight decay, constraints, averages of the weights, `optimizer.iterations` and learning-rate
    schedules move once per update. An epoch of `fit` ends with an update of the batches that are left; a `fit` that
    fails or is interrupted drops them. `train_on_batch` continues an open round (the batches of one update); another
    call of `accumulate` ends it.

    The optimizer's state stays as it is when you switch, and a saved model is the same as without accumulation. Call
    `accumulate` again on a loaded model, on a clone, after `compile`, and after `tfopt.precision.apply` if that changes
    whether the loss is scaled. Batches of an open round are not saved. It takes over from an optimizer with
    `gradient_accumulation_steps`. The gradients kept take as much memory as the weights.

    It installs the repairs that `tfopt.distribute.strategy` installs for as many replicas.

    Args:
        model: A compiled model, before or after `fit`.
        steps: Batches per update; 1 switches it off.

    Returns:
        How many batches an update had before; 1 if none were accumulated.

    Raises:
        TypeError: If `model` is not a Keras model, or `steps` not an integer.
        ValueError: If the model is not compiled with an optimizer, or `steps` is not from 1 to 2**31 - 1.
        tfopt.errors.UnsupportedError: If tfopt's repairs do not know this version of Keras. In the first step: if a
            loss is a sum, or is computed from a whole batch (Dice, Circle, an axis with the examples), or is one number
            while there are sample weights; if it divides by a mask or by sample weights and is not the only one; if a
            train_step is a tf.function, or does not call `model.optimizer.apply` (or `apply_gradients`) once; if the
            model has a second optimizer, or another train_step since, or has been compiled again; if another model or
            your own loop uses the optimizer; or with `LocalSteps`. At the end of an epoch: if batches weigh differently
            in one loss than in another, such as one per node and one per graph.

    Example:
        >>> tfopt.batch.accumulate(model, 4)
        1
        >>> model.fit(dataset.batch(64), epochs=5)  # updates as with batches of 256
    """
    require_compiled(model)
    steps = checks.integer("steps", steps, "Give the batches per update, such as 4.", least=1, most=2**31 - 1)
    if model.optimizer is None:
        raise ValueError(
            f"Expected a model with an optimizer. Received: {model.name!r}, compiled with optimizer=None. Compile it "
            "with one."
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    repairs.install(*(repairs.REPLICAS if replicas > 1 else repairs.ONE_DEVICE))
    try:
        before = _remove(model)
        if steps > 1:
            _put(model, Rounds(model.optimizer, steps))
    finally:  # also if the open round is refused
        rebuild_step_function(model, "train_function")
    return before


def _remove(model: keras.Model) -> int:
    """Ends the open round and all accumulation, Keras' own too; returns how many batches an update had."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    before = 1
    if inner.gradient_accumulation_steps:
        before = inner.gradient_accumulation_steps
        _take_over(model, inner)
    if _ATTRIBUTE in vars(model):
        rounds, own, installed = vars(model).pop(_ATTRIBUTE)
        if vars(model).get("train_step") is installed:  # and not one that the user has set since
            vars(model).pop("train_step")
            vars(model).update(own)
        try:
            if vars(model.optimizer).get(ROUNDS) is rounds:
                before = rounds.steps
                rounds.end()
        finally:
            _detach(rounds)
    return before


def _detach(rounds: Rounds) -> None:
    its = vars(rounds.optimizer)
    if its.get(ROUNDS) is rounds:  # and not those of a model that shares it
        del its[ROUNDS]
        if its.get("apply") == rounds.apply:  # and not one that the user has set since
            its.pop("apply")
            its.update({"apply": rounds.own_apply} if rounds.own_apply else {})


def _take_over(model: keras.Model, inner: Any) -> None:
    end_round(model)
    updates = int(inner.iterations)
    for variable in inner._accumulated_gradients if inner.built else ():
        inner._untrack_variable(variable)
    inner._accumulated_gradients = []
    inner.gradient_accumulation_steps = None
    inner._iterations.assign(updates)  # batches until now


def _put(model: keras.Model, rounds: Rounds) -> None:
    """Replaces methods of the two instances, past Keras' attribute tracking."""
    optimizer, own = model.optimizer, {name: vars(model)[name] for name in ("train_step",) if name in vars(model)}

    def plain(data: Any) -> Any:
        return own["train_step"](data) if own else type(model).train_step(model, data)

    def train_step(data: Any) -> Any:
        if vars(optimizer).get(ROUNDS) is not rounds:  # switched off, but the user's train_step still calls this
            return plain(data)
        if model.optimizer is not optimizer:
            raise UnsupportedError(
                f"Expected {model.name!r} as it was when tfopt.batch.accumulate set it up. Found: it has another "
                "optimizer, since it was compiled again or tfopt.precision.apply changed whether it scales the loss. "
                f"Call tfopt.batch.accumulate(model, {rounds.steps}) again, or with 1 to train without."
            )
        _require_supported(model, own)
        vars(optimizer).setdefault("apply", rounds.apply)  # a wrapper that was removed may have deleted it
        try:
            with training_on(model, data) as batch:
                outputs = plain(data)
        except UnsupportedError:  # an eager step may have added a gradient before
            rounds.drop()
            raise
        if model.trainable_weights and not batch.updates:
            raise UnsupportedError(
                f"Expected a train_step that gives its gradients to model.optimizer. Found: {type(model).__name__}."
                "train_step, which does not call self.optimizer.apply or apply_gradients. Accumulate there yourself, "
                "or call tfopt.batch.accumulate(model, 1)."
            )
        return outputs

    vars(optimizer).update({ROUNDS: rounds, "apply": rounds.apply})
    if not own:
        vars(train_step)[CALLS_OWN] = True
    vars(model).update({_ATTRIBUTE: (rounds, own, train_step), "train_step": train_step})


def _require_supported(model: keras.Model, own: dict[str, Any]) -> None:
    steps = [*own.values(), *(vars(kind).get("train_step") for kind in type(model).__mro__)]
    if any(isinstance(step, tf.types.experimental.PolymorphicFunction) for step in steps):
        raise UnsupportedError(
            f"Expected a train_step that Keras traces itself. Found: {type(model).__name__}.train_step is a "
            "tf.function. Remove @tf.function; `fit` compiles the step without it."
        )
    own_names = {
        name: value for name, value in vars(model).items() if not name.startswith("_self_")
    }  # not TensorFlow's
    for name, value in own_names.items():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, keras.optimizers.Optimizer) and part is not model.optimizer for part in parts):
            raise UnsupportedError(
                "Expected a model with one optimizer, whose gradients to accumulate. Found: another one in "
                f"{type(model).__name__}.{name}, which would update with every batch. Accumulate in train_step "
                "yourself, or remove that attribute."
            )
