"""Compares a model's results with and without XLA: layers' outputs, losses, gradients and a short training."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfopt.measure import StepTimer
from tfopt.model.layers import recorded_calls
from tfopt.model.state import layers_in_float32, optimizers_of, without_dropout
from tfopt.xla.drift import SMALL_GRADIENT, Trained, both_timers, drifts, norm, relative, train

_TOLERANCE = 0.01
_TOLERANCE_16_BIT = 0.1
# Relative to the output before it; anything smaller may be rounding noise.
_SMALL_OUTPUT = 1e-4
_Result = TypeVar("_Result")


class Errors(NamedTuple):
    """How far a 16-bit result is from the same one in float32, over the latter's norm."""

    xla: float
    """With XLA."""
    tensorflow: float
    """Without."""

    @property
    def by_xla(self) -> bool:
        """Whether XLA is to blame: its error is more than twice TensorFlow's own, which rounding cannot explain.

        Rounding made it 1.8 times TensorFlow's at most, among 660 optimizer slots of nets with up to 20 layers.
        """
        return not (math.isfinite(self.xla) and self.xla <= 2 * self.tensorflow)

    def __str__(self) -> str:
        return f"by {self.xla:.1g} with XLA, by {self.tensorflow:.1g} without"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultComparison:
    """How far a model's results with XLA are from those without."""

    tolerance: float
    """Largest distance that counts as rounding."""
    distance: float = 0.0
    """Distance over norm of the result in `where`, or the largest one if all are within `tolerance`."""
    where: str | None = None
    """The first result beyond `tolerance` that XLA is to blame for: "the output of layer dense". If it is to blame for
    none, the one that differs most; None if all are within `tolerance`."""
    layer: str | None = None
    """Path of its layer; None outside all layers."""
    errors: Errors | None = None
    """Its errors against float32; None if no layer computes in 16 bits, or the model cannot compute in float32."""
    unknown: str | None = None
    """Why the results cannot be compared; None if they can."""

    @property
    def wrong(self) -> bool:
        """Whether XLA is to blame for a result beyond `tolerance`, or nothing shows that it is not."""
        return self.where is not None and (self.errors is None or self.errors.by_xla)


def computes_in_16_bits(model: keras.Model) -> bool:
    """Whether a layer computes in 16 bits, where the result without XLA may be the inexact one."""
    return any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())


def compare_results(model: keras.Model, batch: Any, tolerance: float | None = None) -> ResultComparison:
    """Runs training steps with and without XLA, without dropout, from one state, which is restored.

    In the order of computation it compares every layer's floating-point outputs, the logs named for a loss, and the
    gradients handed to optimizers; then the weights and slots after four steps. Layers inside loops are not compared on
    their own. Results in 16 bits that differ are compared with the same ones in float32, computed without XLA.

    Args:
        model, batch: A compiled model and one batch.
        tolerance: Largest distance, over the norm, that counts as rounding. None: 0.01, or 0.1 if a layer computes in
            16 bits.

    Raises:
        tf.errors.OpError: If the step fails, with or without XLA.
    """
    if tolerance is None:
        tolerance = _TOLERANCE_16_BIT if computes_in_16_bits(model) else _TOLERANCE
    with without_dropout(model):
        with _recording(model) as recorded:
            timers = both_timers(model, batch)
        if timers["off"].draws_random_numbers:
            unknown = "the model draws random numbers outside dropout, and XLA draws different ones"
            return ResultComparison(tolerance=tolerance, unknown=unknown)
        off, on = timers["off"].results(), timers["on"].results()
        distances = _distances(recorded, off, on)
        found = _judged(recorded, distances, tolerance, lambda: _errors_of_results(model, batch, recorded, off, on))
        if found.wrong:
            return found
        trained = train(timers)
        if isinstance(trained, str):
            return ResultComparison(tolerance=tolerance, unknown=trained) if "finite" in trained else found
        distances = drifts(trained.changes(trained.off), trained.changes(trained.on))
        if distances[0] <= tolerance:  # all changes together; one alone may be rounding noise
            distances = distances[:1]
        weights = [_Recorded("the weights after four training steps", None, False)] * len(distances)
        drift = _judged(weights, distances, tolerance, lambda: _errors_of_training(model, batch, trained))
    return max(found, drift, key=lambda one: (one.wrong, one.where is not None, one.distance))


def _judged(
    results: Sequence["_Recorded"],
    distances: Sequence[float],
    tolerance: float,
    errors_of: Callable[[], list[Errors] | None],
) -> ResultComparison:
    """Judges results by their distances, and by their errors if a distance is beyond the tolerance."""
    beyond = [at for at, distance in enumerate(distances) if not distance <= tolerance]
    if not beyond:
        return ResultComparison(tolerance=tolerance, distance=max(distances, default=0.0))
    errors = errors_of()
    wrong = [at for at in beyond if errors is None or errors[at].by_xla]
    at = wrong[0] if wrong else max(beyond, key=distances.__getitem__)
    return ResultComparison(
        tolerance=tolerance,
        distance=distances[at],
        where=results[at].name,
        layer=results[at].layer,
        errors=errors[at] if errors else None,
    )


def _errors_of_results(
    model: keras.Model, batch: Any, recorded: Sequence["_Recorded"], off: Sequence[Any], on: Sequence[Any]
) -> list[Errors] | None:
    with _recording(model) as in_float32:
        exact = _run_in_float32(model, batch, StepTimer.results)
    if exact is None or in_float32 != recorded or any(x.dtype.itemsize < 4 or np.isnan(x).any() for x in exact):
        return None
    # What overflows with XLA and without is beyond the range of float16: no error of either.
    exact = [
        np.where(np.isfinite(plain) | np.isfinite(jitted), value, np.inf) if plain.shape == jitted.shape else value
        for value, plain, jitted in zip(exact, off, on, strict=True)
    ]
    return list(map(Errors, _distances(recorded, exact, on), _distances(recorded, exact, off)))


def _errors_of_training(model: keras.Model, batch: Any, trained: Trained) -> list[Errors] | None:
    if trained.on.updates != trained.off.updates:
        return None
    # float16 makes no update where gradients overflow, as they do not in float32.
    updates = trained.off.updates - trained.start.updates or trained.steps
    state = _run_in_float32(model, batch, lambda timer: timer.state_after(updates))
    exact = trained.changes(state) if state else []
    if not any(change.any() for change in exact) or not all(np.isfinite(change).all() for change in exact):
        return None
    return list(map(Errors, *(drifts(exact, trained.changes(other)) for other in (trained.on, trained.off))))


def _run_in_float32(model: keras.Model, batch: Any, run: Callable[[StepTimer], _Result]) -> _Result | None:
    """What `run` returns for the step in float32; None if the model has no 16 bits, or cannot compute without them."""
    layers = model._flatten_layers()
    if not computes_in_16_bits(model) or any(layer.quantization_mode for layer in layers):
        return None
    try:
        with layers_in_float32(model):
            return run(StepTimer(model, batch, jit_compile=False))
    except Exception:  # noqa: BLE001 - whatever the user's layers raise in a dtype they were not made for
        return None


class _Recorded(NamedTuple):
    """Describes a tensor that a recorded step returns."""

    name: str
    layer: str | None
    is_gradient: bool


@contextmanager
def _recording(model: keras.Model) -> Iterator[list[_Recorded]]:
    """Makes training steps traced in the block return their layers' outputs, losses and gradients; yields a list."""
    stock = model.train_step
    recorded: list[_Recorded] = []

    def train_step(data: Any) -> list[Any]:
        with recorded_calls(model) as calls, _recorded_gradients(model) as gradients:
            logs = stock(data)
        outputs = [(call.layer.path or call.layer.name, tensor) for call in calls for tensor in call.outputs]
        losses = {name: logs[name] for name in logs if "loss" in name} if isinstance(logs, dict) else {}
        gradients.reverse()  # from the outputs back, as they are computed
        recorded[:] = [
            *(_Recorded(f"the output of layer {layer}", layer, False) for layer, _ in outputs),
            *(_Recorded(f"the log {name!r}", None, False) for name in losses),
            *(_Recorded(f"the gradient of {name}", name.rpartition("/")[0], True) for name, _ in gradients),
        ]
        tensors = [*(tensor for _, tensor in outputs), *losses.values(), *(tensor for _, tensor in gradients)]
        return [tf.convert_to_tensor(tensor) for tensor in tensors]

    before = model.__dict__.get("train_step")
    model.__dict__["train_step"] = train_step  # bypasses Keras' attribute tracking
    try:
        yield recorded
    finally:
        del model.__dict__["train_step"]
        if before is not None:
            model.__dict__["train_step"] = before


@contextmanager
def _recorded_gradients(model: keras.Model) -> Iterator[list[tuple[str, Any]]]:
    """Records the gradients handed to the model's optimizers, by the path of their variable."""
    optimizers = optimizers_of(model)
    found: list[tuple[str, Any]] = []

    def recording(stock: Any) -> Any:
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = list(trainable_variables or model.trainable_variables)
            found.extend(
                (variable.path, gradient)
                for gradient, variable in zip(grads, variables, strict=False)
                if gradient is not None
            )
            return stock(grads, trainable_variables)

        return apply

    own = [optimizer.__dict__.get("apply") for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.__dict__["apply"] = recording(optimizer.apply)
    try:
        yield found
    finally:
        for optimizer, before in zip(optimizers, own, strict=True):
            del optimizer.__dict__["apply"]
            if before is not None:
                optimizer.__dict__["apply"] = before


def _distances(recorded: Sequence[_Recorded], plain: Sequence[Any], other: Sequence[Any]) -> list[float]:
    """The distance of each result over its norm, or over the least one that matters if that is larger."""
    norms = [norm(value) for value in plain]
    gradients = math.hypot(*(one for one, result in zip(norms, recorded, strict=True) if result.is_gradient))
    scales = [
        max(one, SMALL_GRADIENT * gradients if result.is_gradient else _SMALL_OUTPUT * before)
        for result, one, before in zip(recorded, norms, [0.0, *norms[:-1]], strict=True)
    ]
    return list(map(relative, plain, other, scales))
