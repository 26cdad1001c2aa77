"""An optimizer that updates each replica's copy of the weights with that replica's gradients."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.training import BaseOptimizer
from tfopt.model.state import optimizers_of

# Keras' own versions for a single device, without the merges that TensorFlow's add.
_SINGLE = ("_apply_weight_decay", "_backend_update_step", "_backend_increment_gradient_accumulators")
_RELIED_ON = (*_SINGLE, "_backend_apply_gradients", "apply")
_SUM = "_all_reduce_sum_gradients"


def inner(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


@contextmanager
def updating_locally(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Within the block, replicas that apply gradients neither sum them nor wait for each other.

    Use it around `strategy.run` while the step is traced, or each time if it runs eagerly.
    """
    own = inner(optimizer)
    changed = {name: functools.partial(getattr(BaseOptimizer, name), own) for name in _SINGLE}
    counter = own._iterations.value
    aggregation = getattr(counter, "_aggregation", None)
    own.__dict__.update(changed)
    if own is not optimizer:
        optimizer.__dict__["_tf_apply"] = optimizer._common_apply
    if aggregation is not None:
        counter._aggregation = tf.VariableAggregation.NONE  # each replica counts its own; loss scaling may skip a step
    try:
        yield
    finally:
        for name in changed:
            del own.__dict__[name]
        optimizer.__dict__.pop("_tf_apply", None)
        if aggregation is not None:
            counter._aggregation = aggregation


def require_local(model: keras.Model) -> None:
    """Refuses models whose replicas cannot train by themselves.

    Raises:
        tfopt.errors.UnsupportedError: If the model or its optimizer needs the other replicas in each step.
    """
    found = next(_obstacles(model), None)
    if found:
        raise UnsupportedError(
            f"Expected a model whose replicas can take steps by themselves, for LocalSteps. Found: {found}"
        )


def _obstacles(model: keras.Model) -> Iterator[str]:
    optimizer = inner(model.optimizer)
    kind = type(optimizer).__name__
    if len(set(optimizers_of(model)) | {model.optimizer}) > 1:
        yield "several optimizers. Train with one, or without LocalSteps."
    if hasattr(type(optimizer), "sharding"):
        yield "shard_optimizer, whose replicas complete each other's updates. Leave out one of the two."
    if _SUM in vars(optimizer):
        yield "compress_gradients, but no gradients are sent. Compile the model again without it."
    for name in _RELIED_ON:
        if not inspect.unwrap(getattr(type(optimizer), name)).__module__.startswith("keras."):
            yield f"{kind} with its own {name}. Use one of keras.optimizers."
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        yield "ema_overwrite_frequency. Leave it out; the averages are then applied at the end of fit."
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            yield f"{layer.name!r} with synchronized=True. Use BatchNormalization()."
    for variable in model.variables:
        if variable.aggregation != "none" and variable in model.weights:
            yield f"{variable.path!r} with aggregation={variable.aggregation!r}. Add it without aggregation."
