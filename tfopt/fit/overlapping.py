"""`fit` that waits for nothing on each step, switched on and off for a model."""

import functools
import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfopt.errors import UnsupportedError
from tfopt.fit.in_flight import InFlight
from tfopt.fit.input import ahead, for_predict
from tfopt.fit.patch import PATCH
from tfopt.fit.settings import NAME, Overlap, overlap_of
from tfopt.fit.stepping import OverlappedStep
from tfopt.model.require import require_model

_FUNCTIONS = ("train_function", "test_function")
_OVERRIDES = ("_make_function", "_maybe_symbolic_build", "predict")
_MAKERS = ("make_train_function", "make_test_function", "make_predict_function")
_RELIED_ON = ("_make_function", "_maybe_symbolic_build", "_autoconvert_optionals", *_MAKERS)
_STRATEGIES = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)

_overlapped: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


def overlap(model: keras.Model, *, log_every: int = 20, steps_in_flight: int = 8) -> keras.Model:
    """Lets `fit`, `evaluate` and `predict` of a model launch each step without waiting for the one before.

    Use it wherever a GPU trains, before `compile` or after, fitted before or not; it outlasts `compile`. Batches are
    copied to the GPU before they are asked for, the device stage of a pipeline is attached, and the logs of a step
    stay on the device until somebody reads them. What is trained and logged is the same, bit for bit, but for one thing
    that Keras does wrong: where it does not know how many batches there are, and without XLA, it counts one step too
    many at the end of each epoch (`optimizer.iterations`); here the count is right.

    Callbacks find the values of their step in `logs` whenever they read them. One that reads on every step makes fit
    wait on every step: TerminateOnNaN, TensorBoard(update_freq="batch"), one with the attribute
    `needs_every_step = True`, and any that is seen to do so, is named in a warning. A `train_function` of your own
    stays as it is, with Keras' logs. A copy of the model (cloned, loaded, unpickled) is not overlapped.

    Args:
        model: The model. It may run eagerly, or under a MirroredStrategy, which copies the batches itself.
        log_every: Steps from one update of the progress bar to the next. It also moves on an epoch's first and last
            step, and after a second.
        steps_in_flight: Steps launched and not done, at most: they hold their batches.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is no keras.Model.
        ValueError: `log_every` or `steps_in_flight` is no integer of at least 1.
        tfopt.errors.UnsupportedError: The model overrides what overlap replaces, runs under another strategy, or this
            Keras is not one that overlap knows.

    Example:
        >>> model = tfopt.fit.overlap(model)
        >>> model.fit(dataset, epochs=5)
    """
    _check(model, log_every=log_every, steps_in_flight=steps_in_flight)
    PATCH.install()
    in_flight = InFlight(steps_in_flight, idle=not tf.config.list_logical_devices("GPU"))
    state = overlap_of(model)
    if state is None:
        state = Overlap(log_every=log_every, in_flight=in_flight)
        _attach(model, state)
    state.log_every, state.in_flight = log_every, in_flight
    state.readers.clear()
    return model


def undo(model: keras.Model) -> None:
    """Gives a model Keras' own `fit` back; does nothing to one that is not overlapped.

    Args:
        model: The model.

    Raises:
        TypeError: `model` is no keras.Model.
        tfopt.errors.UnsupportedError: It was the last one, and somebody else has patched Keras' callbacks since.

    Example:
        >>> tfopt.fit.undo(model)
    """
    require_model(model)
    state = overlap_of(model)
    if state is None:
        return
    del model.__dict__[NAME]
    for name, override in state.overrides.items():
        if model.__dict__.get(name) is override:  # somebody may have put a function of their own there since
            del model.__dict__[name]
    for name in _FUNCTIONS:
        function = getattr(model, name)
        if isinstance(function, OverlappedStep):
            setattr(model, name, function.stock)
    _overlapped.discard(model)
    if not _overlapped:
        PATCH.remove()


def _attach(model: keras.Model, state: Overlap) -> None:
    """Puts the overrides into the model's own dictionary, where Keras' attribute tracking does not see them."""
    kind = type(model)

    @functools.wraps(kind._make_function)
    def _make_function(step_function: Callable[..., Any]) -> OverlappedStep:
        return OverlappedStep(kind._make_function(model, step_function), model, state)

    @functools.wraps(kind._maybe_symbolic_build)
    def _maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        kind._maybe_symbolic_build(model, iterator=iterator, data_batch=data_batch)
        # The one thing that fit and evaluate call with their iterator before they use it.
        if iterator is not None:
            iterator._distributed_dataset = ahead(iterator._distributed_dataset)

    @functools.wraps(kind.predict)
    def predict(*args: Any, **kwargs: Any) -> Any:  # a class may have a predict with other arguments
        with model.distribute_strategy.scope():  # where nothing is copied: a strategy does it
            given = [for_predict(argument) for argument in args]
            named = {name: for_predict(argument) for name, argument in kwargs.items()}
        return kind.predict(model, *given, **named)

    state.overrides = dict(zip(_OVERRIDES, (_make_function, _maybe_symbolic_build, predict), strict=True))
    model.__dict__.update(state.overrides, **{NAME: state})
    _overlapped.add(model)
    for name in _FUNCTIONS:
        function: Any = getattr(model, name)
        if getattr(function, "__qualname__", None) == "TensorFlowTrainer._make_function.<locals>.function":
            setattr(model, name, OverlappedStep(function, model, state))


def _check(model: keras.Model, **counts: int) -> None:
    require_model(model)
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ValueError(
                f"Expected {name} to be an integer of at least 1. Received: {name}={count!r}. Give a count of steps."
            )
    if overlap_of(model) is not None:
        return
    own = [name for name in _RELIED_ON if getattr(type(model), name) is not getattr(TensorFlowTrainer, name)]
    own += [name for name in dict.fromkeys((*_RELIED_ON, *_OVERRIDES)) if name in model.__dict__]
    if own:
        raise UnsupportedError(
            f"Expected a model with Keras' own {', '.join(own)}. Found that {model.name!r} ({type(model).__name__}) "
            "overrides it. Fit it without overlap, or put what it does into train_step."
        )
    strategy = model._distribute_strategy
    if strategy is not None and not isinstance(strategy, _STRATEGIES):
        raise UnsupportedError(
            f"Expected a model without a strategy, or under a MirroredStrategy. Found {model.name!r} under a "
            f"{type(strategy).__name__}, where overlap was not shown to train the same. Fit it without overlap."
        )
