"""Wrapping a compiled model's optimizer in a LossScaleOptimizer and unwrapping it, with all its state."""

import keras
from keras.src.utils.tracking import no_automatic_dependency_tracking

from tfopt.repairs.mixed_precision import AUTOMATIC, automatic_wrapper


def scale_loss(model: keras.Model) -> bool:
    """Wraps the model's optimizer in a LossScaleOptimizer, unless it is wrapped or was compiled without scaling.

    The inner optimizer stays the same object, with its iterations and slots. Returns whether the loss is scaled.
    """
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if is_automatic(model):  # Keras' own wrapper, which its compile config lacks
            optimizer.name = AUTOMATIC
            set_optimizer(model, optimizer)
        return True
    if optimizer is None or not model._compile_config.config.get("auto_scale_loss", True):
        return False
    set_optimizer(model, _wrapped(model, optimizer))
    return True


def unscale_loss(model: keras.Model) -> None:
    """Unwraps a LossScaleOptimizer that Keras' compile or tfopt added; the user's own stays."""
    if is_automatic(model):
        wrapper = model.optimizer
        constant = getattr(wrapper, "constant_before", None)
        set_optimizer(model, wrapper.inner_optimizer)
        if constant is not None:
            model.optimizer.loss_scale_factor = constant


def is_automatic(model: keras.Model) -> bool:
    """Whether the model has a LossScaleOptimizer the user did not ask for."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return False
    # The compile config holds what the user passed, so Keras' own wrapper differs from it.
    return optimizer.name == AUTOMATIC or model._compile_config.config["optimizer"] is not optimizer


def _wrapped(model: keras.Model, inner: keras.optimizers.Optimizer) -> keras.optimizers.LossScaleOptimizer:
    wrapper = automatic_wrapper(inner)
    if inner.built:
        # The wrapper's build would build the inner optimizer again, which not every optimizer guards against.
        inner.__dict__["build"] = lambda variables: None
        try:
            with model.distribute_strategy.scope():
                wrapper.build(inner._trainable_variables)
        finally:
            del inner.__dict__["build"]
    return wrapper


@no_automatic_dependency_tracking
def set_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives a compiled model another optimizer, in a way that saving preserves."""
    model.optimizer = optimizer
    model._compile_config.config["optimizer"] = optimizer
