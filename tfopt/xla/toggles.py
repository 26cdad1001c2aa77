"""XLA switched on and off for a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.require import require_compiled
from tfopt.xla.obstacles import standing_obstacles

_FUNCTIONS = ("train_function", "test_function", "predict_function")


def set_jit(model: keras.Model, on: bool) -> None:
    """Switches XLA on or off for a compiled model, from its next step on, fitted before or not.

    Use it in place of `model.jit_compile = on`, which does nothing once the model was fitted and is lost when the model
    is saved. Weights, optimizer and metrics stay. Only the model that is fitted counts: a model inside another one
    runs as the outer one does.

    Args:
        model: A compiled model.
        on: Whether `fit`, `evaluate` and `predict` run under XLA.

    Raises:
        TypeError: `on` is no bool.
        ValueError: The model is not compiled.
        tfopt.errors.UnsupportedError: XLA is asked for and a layer does not support it, the model runs eagerly or on
            several replicas, or op determinism is on.

    Example:
        >>> tfopt.xla.set_jit(model, True)
        >>> model.fit(dataset)
    """
    require_compiled(model)
    if not isinstance(on, bool):
        raise TypeError(f"Expected True or False. Received: {on!r}. Let tfopt.xla.decide(model, data) choose.")
    standing = standing_obstacles(model) if on else ()
    if standing:
        raise UnsupportedError(
            f"Expected a model that XLA can compile. Found: {' '.join(map(str, standing))} Or leave XLA off for it."
        )
    model.jit_compile = on
    # What a saved model is compiled with when it is loaded; Keras writes it in compile() alone.
    model._compile_config.config["jit_compile"] = on
    for name in _FUNCTIONS:
        _renew(model, name)


@contextmanager
def jit(model: keras.Model, on: bool) -> Iterator[None]:
    """Switches XLA on or off for a block, and gives the model its setting back, also after an exception.

    Use it for one `fit` or `evaluate` that must run with XLA or without. What was compiled before the block serves
    again after it: coming back compiles nothing. What the block trained stays. A model that is compiled anew inside the
    block (`model.compile(...)`) keeps what that set.

    Args:
        model: A compiled model.
        on: Whether `fit`, `evaluate` and `predict` run under XLA inside the block.

    Raises:
        TypeError, ValueError, tfopt.errors.UnsupportedError: As for `set_jit`.

    Example:
        >>> with tfopt.xla.jit(model, False):
        ...     model.evaluate(ragged_dataset)
    """
    require_compiled(model)
    compilation = model._compile_config
    before, saved = model.jit_compile, compilation.config["jit_compile"]
    functions = {name: getattr(model, name) for name in _FUNCTIONS}
    set_jit(model, on)
    try:
        yield
    finally:
        # Another compile() in the block made another compilation: the functions before it train what was.
        if model._compile_config is compilation:
            model.jit_compile, compilation.config["jit_compile"] = before, saved
            for name, function in functions.items():
                if function is None:
                    _renew(model, name)
                else:
                    setattr(model, name, function)


def _renew(model: keras.Model, name: str) -> None:
    """Makes a function anew, which fit, evaluate and predict would keep as they traced it first.

    None would do outside of them, but a fit that runs calls what stands there.
    """
    if getattr(model, name) is not None:
        getattr(model, f"make_{name}")(force=True)
