"""Gradient accumulation that computes what a larger batch would: switches it on and off for a model."""

from typing import Any

import keras

from tfopt import checks, repairs
from tfopt.batch.rounds import Rounds, training_on
from tfopt.errors import UnsupportedError
from tfopt.model.layers import require_compiled
from tfopt.model.state import rebuild_step_function
from tfopt.repairs.optimizers import ROUNDS, end_round

_ATTRIBUTE = "_tfopt_accumulated"  # of models: what was put into their `__dict__`


def accumulate(model: keras.Model, steps: int) -> int:
    """Updates a model once for several batches, with the gradient that one batch of all their examples would have.

    Use it to train with a larger batch than fits into memory. The weights are those of the large batch up to rounding,
    with these differences: layers that look at a whole batch, such as BatchNormalization, see each batch by itself,
    dropout draws other masks, and embeddings sum the gradients of an id before they are clipped or squared.

    Examples weigh equally, also in a smaller last batch; so do positions under a mask, and sample weights in a loss
    that divides by them. Clipping and loss scaling act on the mean gradient, and an overflow in one batch skips the
    whole update. Weight decay, constraints, averages of the weights, `optimizer.iterations` and learning-rate schedules
    move once per update. An epoch of `fit` ends with an update of the batches that are left. `train_on_batch` goes on
    with an open round; another call of `accumulate` ends it.

    The optimizer's state stays as it is when you switch, and a saved model is the same as without accumulation; call it
    again on a loaded one, on a clone, and after `compile`. Batches of an open round are not saved. It takes over from
    an optimizer with `gradient_accumulation_steps`. The gradients kept take as much memory as the weights.

    It installs the repairs that `tfopt.distribute.strategy` installs for as many replicas.

    Args:
        model: A compiled model, before or after `fit`.
        steps: Batches per update; 1 switches it off.

    Returns:
        How many batches an update had before; 1 if none were accumulated.

    Raises:
        TypeError: If `model` is not a Keras model, or `steps` not an integer.
        ValueError: If the model is not compiled with an optimizer, or `steps` is below 1.
        tfopt.errors.UnsupportedError: If tfopt's repairs do not know this version of Keras. In the first step: if a
            loss is a sum, or divides by a mask or by sample weights and is not the only one; if a train_step does not
            call `model.optimizer.apply` (or `apply_gradients`) once; if the model has been compiled again since; or
            with `LocalSteps`.

    Example:
        >>> tfopt.batch.accumulate(model, 4)
        1
        >>> model.fit(dataset.batch(64), epochs=5)  # updates as with batches of 256
    """
    require_compiled(model)
    steps = checks.integer("steps", steps, "Give the batches per update, such as 4.", least=1)
    if model.optimizer is None:
        raise ValueError(
            f"Expected a model with an optimizer. Received: {model.name!r}, compiled with optimizer=None. Compile it "
            "with one."
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    repairs.install(*(repairs.REPLICAS if replicas > 1 else repairs.ONE_DEVICE))
    before = _remove(model)
    if steps > 1:
        _put(model, Rounds(model.optimizer, steps))
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
        rounds, own = vars(model).pop(_ATTRIBUTE)
        vars(model).pop("train_step")
        vars(model).update(own)
        if vars(model.optimizer).get(ROUNDS) is rounds:
            before = rounds.steps
            rounds.end()
        for name in ("apply", ROUNDS):
            vars(rounds.optimizer).pop(name, None)
    return before


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

    def train_step(data: Any) -> Any:
        if model.optimizer is not optimizer:
            raise UnsupportedError(
                f"Expected {model.name!r} as it was when tfopt.batch.accumulate set it up. Found: it was compiled "
                f"again. Call tfopt.batch.accumulate(model, {rounds.steps}) again, or with 1 to train without."
            )
        vars(optimizer).setdefault("apply", rounds.apply)  # who replaced it for a while may have dropped it
        with training_on(model, data) as batch:
            outputs = own["train_step"](data) if own else type(model).train_step(model, data)
        if model.trainable_weights and not batch.updates:
            raise UnsupportedError(
                f"Expected a train_step that gives its gradients to model.optimizer. Found: {type(model).__name__}."
                "train_step, which does not call self.optimizer.apply or apply_gradients. Accumulate there yourself, "
                "or call tfopt.batch.accumulate(model, 1)."
            )
        return outputs

    vars(optimizer).update({ROUNDS: rounds, "apply": rounds.apply})
    vars(model).update({_ATTRIBUTE: (rounds, own), "train_step": train_step})
