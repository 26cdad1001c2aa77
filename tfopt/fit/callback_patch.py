"""Patches Keras so that callbacks get each step's logs unconverted: the only global change that overlap needs."""

from collections.abc import Callable
from typing import Any

from keras.callbacks import CallbackList

from tfopt.fit.launching import Overlap, OverlappedStep, overlap_of
from tfopt.fit.logs import LazyLogs, LogDelivery, is_settled
from tfopt.repairs import Repair
from tfopt.repairs.repair import Function

_LIST = "keras.src.callbacks.callback_list:CallbackList"
_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"


def _batch_end(hook: str, function: str) -> Callable[[Function], Function]:
    """Returns the factory that replaces the method behind a hook of `fit` or `evaluate` for overlapped steps."""

    def make(stock: Function) -> Function:
        def on_batch_end(self: CallbackList, batch: int, logs: Any = None) -> None:
            step = _overlapped_step(self, function)
            if step is not None and is_settled(logs):
                _deliver(step.overlap, self, hook, batch, logs)
            else:
                stock(self, batch, logs)

        return on_batch_end

    return make


def _predict(stock: Function) -> Function:
    def _on_predict_batch_end(self: CallbackList, batch: int, logs: Any = None) -> None:
        model = _model_of(self)
        overlap = overlap_of(model)
        if overlap is None or not logs or model.run_eagerly:
            stock(self, batch, logs)
        else:
            overlap.in_flight.launched(logs["outputs"])
            _deliver(overlap, self, "on_predict_batch_end", batch, logs)

    return _on_predict_batch_end


def _overlapped_step(callbacks: CallbackList, name: str) -> OverlappedStep | None:
    """The overlapped step that ran, if any, even if a callback has wrapped it."""
    step: Any = getattr(_model_of(callbacks), name, None)
    while not isinstance(step, OverlappedStep) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step if isinstance(step, OverlappedStep) else None


def _model_of(callbacks: CallbackList) -> Any:
    """The model of a list of callbacks, or None."""
    return getattr(callbacks, "_model", None)


def _deliver(overlap: Overlap, callbacks: CallbackList, hook: str, batch: int, logs: Any) -> None:
    delivery = overlap.deliveries.get(callbacks)
    if delivery is None:
        delivery = overlap.deliveries[callbacks] = LogDelivery(overlap.log_every)
    delivery.deliver(callbacks, hook, batch, LazyLogs(logs))


PATCH = Repair(
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
        f"{_TRAINER}.evaluate": frozenset({"9ad3bb843b4d8584"}),
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
    without="Call model.fit without tfopt.fit.overlap.",
)
