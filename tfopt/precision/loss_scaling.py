"""A compiled model's optimizer, put into a LossScaleOptimizer and taken out again with all its state."""

import keras
from keras.src.utils.tracking import no_automatic_dependency_tracking

from tfopt.repairs.loss_scaling import AUTOMATIC, automatic_wrapper


def scale_loss(model: keras.Model) -> bool:
    """Puts the model's optimizer into a LossScaleOptimizer, unless it is in one or the user compiled without.

    The inner optimizer stays the very object with its iterations and slots; the wrapper is kept in the compile config
    too, so that a saved file brings it back under any global policy.

    Returns:
        Whether the loss is scaled.
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
    """Takes a LossScaleOptimizer off again that Keras' compile or tfopt put there; the user's own stays."""
    if is_automatic(model):
        wrapper = model.optimizer
        constant = getattr(wrapper, "constant_before", None)
        set_optimizer(model, wrapper.inner_optimizer)
        if constant is not None:
            model.optimizer.loss_scale_factor = constant


def is_automatic(model: keras.Model) -> bool:
    """Whether the model has a LossScaleOptimizer that the user did not ask for."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return False
    # Keras' compile keeps what the user passed: a wrapper of its own stands beside it.
    return optimizer.name == AUTOMATIC or model._compile_config.config["optimizer"] is not optimizer


def _wrapped(model: keras.Model, inner: keras.optimizers.Optimizer) -> keras.optimizers.LossScaleOptimizer:
    wrapper = automatic_wrapper(inner)
    if inner.built:
        # The wrapper's build builds the inner one again, which an optimizer that does not guard itself would obey.
        inner.__dict__["build"] = lambda variables: None
        try:
            with model.distribute_strategy.scope():
                wrapper.build(inner._trainable_variables)
        finally:
            del inner.__dict__["build"]
    return wrapper


@no_automatic_dependency_tracking
def set_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives a compiled model another optimizer, which a saved model brings back."""
    model.optimizer = optimizer
    model._compile_config.config["optimizer"] = optimizer
