"""Compares what a model computes with and without XLA: its layers' outputs, gradients and short trainings."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.measure import StepTimer
from tfopt.model.layers import recorded_calls
from tfopt.model.state import without_dropout
from tfopt.repairs import optimizers_of

# Weights may not move at first: float16 skips steps until its loss scale fits, accumulation updates every n-th step.
_DRIFT_STEPS = (4, 64)
_TOLERANCE = 0.01
_TOLERANCE_16_BIT = 0.1
# Anything smaller may be rounding noise: a gradient relative to all gradients, an output relative to the one before it.
_SMALL_GRADIENT = 0.1
_SMALL_OUTPUT = 1e-4


Timers = Mapping[str, StepTimer]
"""Timers of the step without and with XLA, named "off" and "on"."""


def measure_drift(model: keras.Model, batch: Any, timers: Timers) -> tuple[float | None, str]:
    """Trains from one state with and without XLA; returns the distance between the results over the distance moved.

    The distance is measured on the optimizer's slots, which hold gradients, or on the weights if there are no slots:
    Adam moves a weight whose gradient is rounding noise as far as any other. `JitDecision.drift` lists typical values.
    If the step draws random numbers, both steps are traced again without dropout, because XLA draws different masks
    from the same seed.

    Returns:
        The drift and "", or None and why it is unknown. NaN if only XLA's numbers are not finite.
    """
    with ExitStack() as stack:
        if timers["off"].draws_random_numbers:
            stack.enter_context(without_dropout(model))
            timers = both_timers(model, batch)
        if timers["off"].draws_random_numbers:
            return None, "the model draws random numbers outside dropout"
        return _drift(timers)


def both_timers(model: keras.Model, batch: Any) -> Timers:
    """Returns timers of the training step without and with XLA."""
    return {name: StepTimer(model, batch, jit_compile=on) for name, on in (("off", False), ("on", True))}


def _drift(timers: Timers) -> tuple[float | None, str]:
    start = timers["off"].state_after(0)
    for count in _DRIFT_STEPS:
        off = timers["off"].state_after(count)
        for part in range(len(start)):
            travelled = _distance(off[part], start[part])
            if not math.isfinite(travelled):
                return None, "the training gives no finite numbers without XLA either"
            if travelled:
                return _distance(timers["on"].state_after(count)[part], off[part]) / travelled, ""
    return None, "its weights did not move"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultComparison:
    """How far a model's results with XLA are from those without."""

    tolerance: float
    """Largest distance that counts as rounding: 0.01, or 0.1 if a layer computes in 16 bits."""
    distance: float = 0.0
    """Distance over norm of the first result beyond `tolerance`, or the largest one if all are within it."""
    where: str | None = None
    """The first result beyond `tolerance`: "the output of layer dense"; None if all are within it."""
    layer: str | None = None
    """Path of its layer; None outside all layers."""
    unknown: str | None = None
    """Why the results cannot be compared; None if they can."""

    @property
    def in_16_bits(self) -> bool:
        """Whether a layer computes in 16 bits, where the result without XLA may be the inexact one."""
        return self.tolerance == _TOLERANCE_16_BIT


def compare_results(model: keras.Model, batch: Any) -> ResultComparison:
    """Runs training steps with and without XLA, without dropout, from one state, which is restored.

    In the order of computation it compares every layer's floating-point outputs, the logs named for a loss, and the
    gradients handed to optimizers; then the weights and slots after four steps. Layers inside loops are not compared on
    their own.

    Raises:
        tf.errors.OpError: If the step fails, with or without XLA.
    """
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    tolerance = _TOLERANCE_16_BIT if dtypes & {"float16", "bfloat16"} else _TOLERANCE
    with without_dropout(model):
        with _recording(model) as recorded:
            timers = both_timers(model, batch)
        if timers["off"].draws_random_numbers:
            unknown = "the model draws random numbers outside dropout, and XLA draws different ones"
            return ResultComparison(tolerance=tolerance, unknown=unknown)
        off, on = timers["off"].results(), timers["on"].results()
        norms = [_norm(value) for value in off]
        gradients = math.hypot(*(norm for norm, result in zip(norms, recorded, strict=True) if result.is_gradient))
        farthest = before = 0.0
        for result, norm, plain, jitted in zip(recorded, norms, off, on, strict=True):
            floor = _SMALL_GRADIENT * gradients if result.is_gradient else _SMALL_OUTPUT * before
            distance, before = _relative(plain, jitted, max(norm, floor)), norm
            if not distance <= tolerance:
                return ResultComparison(tolerance=tolerance, distance=distance, where=result.name, layer=result.layer)
            farthest = max(farthest, distance)
        drift, unknown = _drift(timers)
    if drift is not None and not drift <= tolerance:
        where = "the weights after four training steps"
        return ResultComparison(tolerance=tolerance, distance=drift, where=where)
    if drift is None and "finite" in unknown:
        return ResultComparison(tolerance=tolerance, unknown=unknown)
    return ResultComparison(tolerance=tolerance, distance=max(farthest, drift or 0.0))


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

    for optimizer in optimizers:
        optimizer.__dict__["apply"] = recording(optimizer.apply)
    try:
        yield found
    finally:
        for optimizer in optimizers:
            del optimizer.__dict__["apply"]


def _relative(plain: Any, jitted: Any, norm: float) -> float:
    """Distance between two arrays over `norm`; infinite if shapes differ, or which numbers are finite; 0 beside NaN."""
    if plain.shape != jitted.shape:
        return math.inf
    if np.isnan(plain).any():  # after an overflow, say, which proves nothing
        return 0.0
    finite = np.isfinite(plain)
    if not np.array_equal(finite, np.isfinite(jitted)):
        return math.inf
    distance = _norm(jitted[finite].astype("float64") - plain[finite].astype("float64"))
    return distance / norm if norm else math.inf if distance else 0.0


def _norm(array: Any) -> float:
    """The norm of the finite numbers in an array."""
    array = array.astype("float64")
    return float(np.linalg.norm(array[np.isfinite(array)]))


def _distance(a: list[Any], b: list[Any]) -> float:
    return math.sqrt(
        sum(float(np.sum((x.astype("float64") - y.astype("float64")) ** 2)) for x, y in zip(a, b, strict=True))
    )
