"""Giving a compiled model another optimizer with all its state: with or without loss scaling, or for new weights."""

from collections import Counter
from collections.abc import Iterable

import keras

from tfopt.errors import UnsupportedError
from tfopt.internals.layers import no_automatic_dependency_tracking
from tfopt.repairs.mixed_precision import AUTOMATIC, automatic_wrapper

INITIAL_SCALE = 2.0**15
"""Where Keras' LossScaleOptimizer starts."""


def wants_scaling(model: keras.Model) -> bool:
    """Whether `scale_loss` wraps the plain optimizer of a compiled model: it has one, and its user did not object."""
    return model.optimizer is not None and model._compile_config.config.get("auto_scale_loss", True)


def first_scale(model: keras.Model, optimizer: keras.optimizers.Optimizer | None, *, applied: bool) -> float | None:
    """The loss scale that training in float16 will start from and adapt; None if the optimizer does not scale.

    Args:
        model: A compiled model.
        optimizer: One of its optimizers.
        applied: Whether `apply` will have wrapped the model's own optimizer.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return float(optimizer.dynamic_scale.numpy() if optimizer.built else optimizer.initial_scale)
    own = any(x.optimizer is optimizer and wants_scaling(x) for x in _compiled_models(model)) if applied else False
    return INITIAL_SCALE if own else None


def _compiled_models(model: keras.Model) -> list[keras.Model]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model) and layer.compiled]


def scale_loss(model: keras.Model) -> bool:
    """Wraps the model's optimizer in a LossScaleOptimizer, unless it is wrapped or was compiled without scaling.

    The inner optimizer stays the same object, with its iterations and slots. Returns whether the loss is scaled.
    """
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if _is_automatic(model):  # Keras' own wrapper, which its compile config lacks
            optimizer.name = AUTOMATIC
            _set_optimizer(model, optimizer)
        return True
    if not wants_scaling(model):
        return False
    _set_optimizer(model, _wrapped(model, optimizer))
    return True


def unscale_loss(model: keras.Model) -> None:
    """Unwraps a LossScaleOptimizer that Keras' compile or tfopt added; the user's own stays."""
    if _is_automatic(model):
        wrapper = model.optimizer
        constant = getattr(wrapper, "constant_before", None)
        _set_optimizer(model, wrapper.inner_optimizer)
        if constant is not None:
            model.optimizer.loss_scale_factor = constant


def rebuilt_optimizer(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """A new optimizer like the model's, since a built one takes no more weights; None if the model's is not built."""
    old = model.optimizer if model.compiled else None
    if old is None or not old.built:
        return None
    try:
        with model.distribute_strategy.scope():
            return type(old).from_config(old.get_config())
    except Exception as error:  # whatever the user's class or schedule raises
        raise UnsupportedError(
            "Expected an optimizer that can be rebuilt from its config, since float8 adds weights. Found "
            f"{type(old).__name__}, which failed: {error} Register its class, or that of its learning rate schedule, "
            "with keras.saving.register_keras_serializable and give it a get_config; or apply float8 before compiling "
            "the model."
        ) from error


def replace_optimizer(model: keras.Model, new: keras.optimizers.Optimizer) -> None:
    """Gives a compiled model a rebuilt optimizer with the old one's state, for the model's present weights."""
    old = model.optimizer
    _carry_over(old, new)
    present_ids = {id(variable) for variable in model.trainable_variables}
    # Weights frozen since the optimizer was built keep their slots, in case they train again.
    frozen = [variable for variable in old._trainable_variables if id(variable) not in present_ids]
    with model.distribute_strategy.scope():
        new.build([*model.trainable_variables, *frozen])
    values = _by_path(new.variables)
    for key, variable in _by_path(old.variables).items():
        values[key].assign(variable)
    _set_optimizer(model, new)


def _set_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives a compiled model another optimizer, in a way that saving preserves."""
    no_automatic_dependency_tracking(_assign_optimizer)(model, optimizer)


def _assign_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    model.optimizer = optimizer
    model._compile_config.config["optimizer"] = optimizer


def _is_automatic(model: keras.Model) -> bool:
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


def _carry_over(old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer) -> None:
    """Copies the settings of an optimizer that its config lacks."""
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern", "constant_before"):
        if name in vars(old):
            setattr(new, name, vars(old)[name])
    if isinstance(old, keras.optimizers.LossScaleOptimizer):
        _carry_over(old.inner_optimizer, new.inner_optimizer)


def _by_path(variables: Iterable[keras.Variable]) -> dict[tuple[str, int], keras.Variable]:
    """Variables by path, numbered where paths repeat."""
    seen: Counter[str] = Counter()
    found = {}
    for variable in variables:
        found[variable.path, seen[variable.path]] = variable
        seen[variable.path] += 1
    return found
