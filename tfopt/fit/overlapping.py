"""Switches overlap on and off for a model: its methods, its input, and the logs that callbacks get.

Only the logs need a global change, a patch of Keras that passes each step's logs on unconverted.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import CallbackList

from tfopt import checks
from tfopt.errors import DeviceMemoryError, UnsupportedError
from tfopt.fit.launching import InFlight, Overlap, OverlappedStep, overlap_of, overlapped_step, steps_ahead
from tfopt.fit.logs import LazyLogs, LogDelivery, is_settled
from tfopt.fit.many_steps import ManySteps
from tfopt.fit.trial import Trial
from tfopt.internals.fit_door import open_door
from tfopt.internals.patches import patched
from tfopt.internals.training import has_keras_own
from tfopt.model.batches import OVERLAP, ends_on_device
from tfopt.model.layers import require_model
from tfopt.pipelines.device.copying import CopiedAhead, IntegersOnHost, copy_ahead, is_int32
from tfopt.pipelines.device.device_stage import NotAttached, stage_of
from tfopt.pipelines.device.placing import choose_device, is_gpu
from tfopt.repairs import Repair
from tfopt.repairs.optimizers import repair_optimizer
from tfopt.repairs.probes import equal
from tfopt.repairs.repair import Function
from tfopt.warn import warn_once

_FUNCTIONS = ("train_function", "test_function")
_OVERRIDES = ("_make_function", "_maybe_symbolic_build", "predict")
_MAKERS = ("make_train_function", "make_test_function", "make_predict_function")
_RELIED_ON = ("_make_function", "_maybe_symbolic_build", "_autoconvert_optionals", *_MAKERS)
_STRATEGIES = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)

_overlapped: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


def overlap(
    model: keras.Model, *, log_every: int = 20, steps_in_flight: int = 8, steps_per_launch: int | str = 1
) -> keras.Model:
    """Makes `fit`, `evaluate` and `predict` of a model launch each step without waiting for the one before.

    Use it on a GPU, before or after `compile`. Batches are copied to the GPU ahead of time, or made there if a pipeline
    keeps its examples on the device, and a step's logs stay on the device until they are read. Training and logs are
    the same, bit for bit, with one exception: if Keras does not know the number of batches, and without XLA, it counts
    one step too many at the end of each epoch (`optimizer.iterations`); here the count is correct.

    Callbacks find their step's values in `logs` whenever they read them. A callback that reads on every step makes
    `fit` wait on every step, and is named in a warning. If you set `train_function` yourself, it is called as before,
    with Keras' logs. Copies of the model (cloned, loaded, unpickled) are not overlapped.

    Args:
        model: The model. It may run eagerly, or under a MirroredStrategy, which copies the batches itself.
        log_every: Steps between updates of the progress bar, which also moves on an epoch's first and last step, and
            after a second. Default: 20.
        steps_in_flight: Most steps launched but not done; each holds its batch. Default: 8.
        steps_per_launch: Training steps in one launch, for models whose steps are so short that Python sets the pace.
            Each step's logs still reach the callbacks, but the weights that they see are those of the launch's last
            step; a callback that may act between steps makes it 1, and is named in a warning (docs/fit.md). "auto"
            tries the largest number from 8 to 32 that divides the epoch, and keeps it if it is faster. Default: 1.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is not a keras.Model.
        ValueError: If `log_every`, `steps_in_flight` or `steps_per_launch` is not an integer of at least 1, or "auto".
        tfopt.errors.UnsupportedError: If the model overrides what overlap replaces, runs under another strategy, or
            tfopt does not know this version of Keras.

    Example:
        >>> model = tfopt.fit.overlap(model)
        >>> model.fit(dataset, epochs=5)
    """
    require_model(model)
    checks.count("log_every", log_every, "Pass a number of steps.")
    checks.count("steps_in_flight", steps_in_flight, "Pass a number of steps.")
    if steps_per_launch != "auto":
        checks.count("steps_per_launch", steps_per_launch, 'Pass a number of steps, or "auto".')
    _require_no_launch(model)
    PATCH.applies()  # first: a version that lacks a method is refused by its name
    _require_own(model)
    if steps_per_launch != 1:
        if model._distribute_strategy is not None:
            raise UnsupportedError(
                f"Expected a model without a strategy for steps_per_launch={steps_per_launch!r}. Found {model.name!r} "
                f"under a {type(model._distribute_strategy).__name__}. Pass steps_per_launch=1."
            )
        open_door()
    PATCH.install()
    in_flight = InFlight(steps_in_flight, idle=not tf.config.list_logical_devices("GPU"))
    state = overlap_of(model)
    if state is None:
        state = Overlap(log_every=log_every, in_flight=in_flight)
        _attach(model, state)
    state.log_every, state.in_flight = log_every, in_flight
    state.steps_per_launch = Trial() if steps_per_launch == "auto" else steps_per_launch
    state.deliveries.clear()
    for name in _FUNCTIONS:
        function: Any = getattr(model, name)
        if isinstance(function, OverlappedStep):
            function = function.stock
        if getattr(function, "__qualname__", None) == "TensorFlowTrainer._make_function.<locals>.function":
            setattr(model, name, _step(function, model, state, trains=name == "train_function"))
    return model


def _require_no_launch(model: keras.Model) -> None:
    if steps_ahead(model):
        raise UnsupportedError(
            f"Expected {model.name!r} between two launches. Found it {steps_ahead(model)} steps ahead of the callbacks "
            "that are being called. Change it at the end of an epoch, or where acts_every says (docs/fit.md)."
        )


def _step(stock: Callable[..., Any], model: keras.Model, state: Overlap, *, trains: bool) -> OverlappedStep:
    kind = ManySteps if trains and state.steps_per_launch != 1 else OverlappedStep
    return kind(stock, model, state)


def undo(model: keras.Model) -> None:
    """Restores Keras' own `fit`; does nothing to a model that is not overlapped.

    Raises:
        TypeError: If `model` is not a keras.Model.
        tfopt.errors.UnsupportedError: If it is the last overlapped model, and Keras' callbacks have been patched again.

    Example:
        >>> tfopt.fit.undo(model)
    """
    require_model(model)
    state = overlap_of(model)
    if state is None:
        return
    _require_no_launch(model)
    del model.__dict__[OVERLAP]
    for name, override in state.overrides.items():
        if model.__dict__.get(name) is override:  # the user may have set a function since
            del model.__dict__[name]
    for name in _FUNCTIONS:
        function = getattr(model, name)
        if isinstance(function, OverlappedStep):
            setattr(model, name, function.stock)
    _overlapped.discard(model)
    if not _overlapped:
        PATCH.remove()


def _attach(model: keras.Model, state: Overlap) -> None:
    """Puts the overrides into the model's `__dict__`, where Keras' attribute tracking does not see them."""
    kind = type(model)

    @functools.wraps(kind._make_function)
    def _make_function(step_function: Callable[..., Any]) -> OverlappedStep:
        stock = kind._make_function(model, step_function)
        return _step(stock, model, state, trains=step_function == model.train_step)

    @functools.wraps(kind._maybe_symbolic_build)
    def _maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        repair_optimizer(model)
        kind._maybe_symbolic_build(model, iterator=iterator, data_batch=data_batch)
        # fit and evaluate call no other method with their iterator before they use it.
        if iterator is not None:
            iterator._distributed_dataset = ahead(iterator._distributed_dataset, jit=model.jit_compile)

    @functools.wraps(kind.predict)
    def predict(*args: Any, **kwargs: Any) -> Any:  # a subclass may take other arguments
        with model.distribute_strategy.scope():  # a strategy does the copying itself
            given = [for_predict(argument) for argument in args]
            named = {name: for_predict(argument) for name, argument in kwargs.items()}
        return kind.predict(model, *given, **named)

    state.overrides = dict(zip(_OVERRIDES, (_make_function, _maybe_symbolic_build, predict), strict=True))
    model.__dict__.update(state.overrides, **{OVERLAP: state})
    _overlapped.add(model)


def _require_own(model: keras.Model) -> None:
    if overlap_of(model) is not None:
        return
    own = [name for name in _RELIED_ON if not has_keras_own(model, name)]
    own += [name for name in dict.fromkeys((*_RELIED_ON, *_OVERRIDES)) if name in model.__dict__]
    if own:
        raise UnsupportedError(
            f"Expected a model with Keras' own {', '.join(own)}. Found that {model.name!r} ({type(model).__name__}) "
            "overrides it. Fit it without overlap, or move the change into train_step."
        )
    strategy = model._distribute_strategy
    if strategy is not None and not isinstance(strategy, _STRATEGIES):
        raise UnsupportedError(
            f"Expected a model without a strategy, or under a MirroredStrategy. Found {model.name!r} under a "
            f"{type(strategy).__name__}, where overlap has not been shown to train the same. Fit it without overlap."
        )


class DeviceStageBatches:
    """Batches of a pipeline with a device stage (`stage_of(dataset)`), made on the device from what tf.data yields."""

    def __init__(self, stage: Any):
        self._stage = stage
        self.element_spec = stage.element_spec

    def __iter__(self) -> "DeviceStageIterator":
        return DeviceStageIterator(self._stage)


class DeviceStageIterator(Iterator[Any]):
    """Iterates `DeviceStageBatches`."""

    def __init__(self, stage: Any):
        self.stage, self.elements = stage, iter(stage.elements)
        self.element_spec = stage.element_spec

    def __next__(self) -> Any:
        return self.stage.batch(next(self.elements))


def ahead(dataset: Any, *, jit: bool) -> Any:
    """Returns what to iterate instead of a dataset, so that its batches are on the device before they are needed.

    A pipeline's device stage is attached, if its examples find room. Any other dataset gets a copy to the GPU as its
    last stage, unless it ends with one, there is no GPU, or a strategy copies the batches to its own devices. Where XLA
    does not compile the step (`jit`), int32 parts stay on the host.
    """
    if not isinstance(dataset, tf.data.Dataset):  # prepared already, or distributed
        return dataset
    stage = stage_of(dataset)
    if stage is not None and _has_room(stage):
        return DeviceStageBatches(stage)
    copied = _copied_ahead(dataset)
    if jit or not isinstance(copied, CopiedAhead) or not is_gpu(copied.device):
        return copied
    integers = [is_int32(leaf) for leaf in tf.nest.flatten(copied.element_spec)]
    if all(integers):
        return copied.host
    return DeviceStageBatches(IntegersOnHost(copied)) if any(integers) else copied


def _has_room(stage: Any) -> bool:
    """Loads the examples of a pipeline that also works without; one with cache="device" raises at its first batch."""
    if not stage.only:
        try:
            stage.load()
        except DeviceMemoryError as error:
            warn_once("examples_not_on_device", f"{error} The host makes the batches now, as in a plain `fit`.")
            return False
    return True


def for_predict(data: Any) -> Any:
    """Returns what to pass to `predict`: datasets with a copy to the GPU, anything else unchanged.

    Raises:
        tfopt.errors.UnsupportedError: If only a device stage makes the batches, which predict cannot attach.
    """
    if isinstance(data, NotAttached):
        raise UnsupportedError(
            "Expected a dataset without a device stage for predict. Found one with cache='device'. Build it with "
            "cache='memory' or None, and training=False to get the predictions in order."
        )
    return _copied_ahead(data) if isinstance(data, tf.data.Dataset) else data


def _copied_ahead(dataset: Any) -> Any:
    if ends_on_device(dataset):
        return dataset
    device, _ = choose_device("auto", dataset.element_spec)
    return dataset if device is None else copy_ahead(dataset, device, None)


_LIST = "keras.src.callbacks.callback_list:CallbackList"
_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"


def _batch_end(hook: str, function: str) -> Callable[[Function], Function]:
    """Returns the factory that replaces the method behind a hook of `fit` or `evaluate` for overlapped steps."""

    def make(stock: Function) -> Function:
        def on_batch_end(self: CallbackList, batch: int, logs: Any = None) -> None:
            model: Any = getattr(self, "_model", None)
            step = overlapped_step(model, function)
            if step is None or not is_settled(logs):
                stock(self, batch, logs)
                return
            step.begin_hooks()
            _deliver(step.overlap, self, hook, batch, logs)
            step.end_hooks()

        return on_batch_end

    return make


def _predict(stock: Function) -> Function:
    def _on_predict_batch_end(self: CallbackList, batch: int, logs: Any = None) -> None:
        model: Any = getattr(self, "_model", None)
        overlap = overlap_of(model)
        if overlap is None or not logs or model.run_eagerly:
            stock(self, batch, logs)
        else:
            overlap.in_flight.launched(logs["outputs"])
            _deliver(overlap, self, "on_predict_batch_end", batch, logs)

    return _on_predict_batch_end


def _deliver(overlap: Overlap, callbacks: CallbackList, hook: str, batch: int, logs: Any) -> None:
    delivery = overlap.deliveries.get(callbacks)
    if delivery is None:
        delivery = overlap.deliveries[callbacks] = LogDelivery(overlap.log_every)
    delivery.deliver(callbacks, hook, batch, logs if isinstance(logs, LazyLogs) else LazyLogs(logs))


class _Patch(Repair):
    @contextmanager
    def tried(self) -> Iterator[None]:
        """Patches in a block whatever the version, and overlaps each model that is compiled in it."""

        def overlapped(stock: Function) -> Function:
            def compile(model: Any, *args: Any, **kwargs: Any) -> None:
                stock(model, *args, **kwargs)
                _attach(model, Overlap(log_every=10, in_flight=InFlight(4, idle=True)))

            return compile

        with super().tried(), patched(keras.Model, "compile", overlapped, by=self.name):
            yield


PATCH = _Patch(
    name="overlap",
    defect="model.fit waits for the device on every step.",
    unpatched="Nothing is changed, and the model trains as it did:",
    reference="keras/src/callbacks/callback_list.py: the logs of each step are converted even if nobody reads them.",
    broken={
        f"{_LIST}._on_train_batch_end": frozenset({"b302d4690a6014f5"}),
        f"{_LIST}._on_test_batch_end": frozenset({"d718ec2a52d0c27e"}),
        f"{_LIST}._on_predict_batch_end": frozenset({"d39a4729f94f3d4b"}),
        f"{_TRAINER}._make_function": frozenset({"703051878417df76"}),
        f"{_TRAINER}._autoconvert_optionals": frozenset({"ba7d80fa0c372fd1"}),
        f"{_TRAINER}._maybe_symbolic_build": frozenset({"f8854e57c6c86238"}),
        f"{_TRAINER}.fit": frozenset({"c443656a13e238bb"}),
        f"{_TRAINER}.evaluate": frozenset({"9ad3bb843b4d8584", "162deb84e1b61c0d"}),
        f"{_TRAINER}.predict": frozenset({"994b523efcb655cd"}),
        "keras.src.utils.python_utils:pythonify_logs": frozenset({"6611c3fe8a814979"}),
        "keras.src.callbacks.progbar_logger:ProgbarLogger._update_progbar": frozenset({"ebe09afe4c2f4e2d"}),
        "keras.src.callbacks.tensorboard:TensorBoard.on_train_batch_end": frozenset({"efb1c456e079257f"}),
    },
    replace={
        f"{_LIST}._on_train_batch_end": _batch_end("on_train_batch_end", "train_function"),
        f"{_LIST}._on_test_batch_end": _batch_end("on_test_batch_end", "test_function"),
        f"{_LIST}._on_predict_batch_end": _predict,
    },
    probe=equal("tfopt.fit.overlapping:PATCH"),
    without="Call model.fit without tfopt.fit.overlap.",
)
