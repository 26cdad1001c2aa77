"""`assign`: which layers to train in 16 bits so that a step is fastest, by each layer's measured time and error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks, hardware
from tfopt.measure import Comparison, StepTimer, StepTimes, compare, interleave
from tfopt.model.batches import as_dataset, first_alike_batches
from tfopt.model.layers import layer_paths, require_compiled
from tfopt.precision.gate.check import check
from tfopt.precision.gate.layer_table import as_json
from tfopt.precision.gate.precision_report import PrecisionReport
from tfopt.precision.layer_policies import (
    Assignment,
    Policy,
    assign_policies,
    current_policy,
    is_16_bit,
    under_policies,
)
from tfopt.precision.optimizer_swap import scale_loss, unscale_loss
from tfopt.precision.per_layer.layer_times import measure_layers
from tfopt.precision.per_layer.search import LayerFacts, fastest
from tfopt.repairs import computes_in_float16
from tfopt.text import Shown, aligned, percent

_BATCHES = 3  # as `check` takes
_ROUNDS = 3
_TURNS = 6
_MORE_TIMES = 2
_BLOCKS = 3
_BLOCK_MS = 20.0
_MOST_STEPS = 50
_FLOAT32, _PER_LAYER = "float32", "per layer"
_HEAD = ("layer", "class", "float32", "16 bits", "own error", "policy", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedLayer:
    """The measurements of one layer, with everything inside it, and the policy they led to."""

    path: str
    """Names from the model down to the layer."""
    kind: str
    """Its class."""
    policy: str
    """The policy `assign` chose for it."""
    float32_ms: float | None
    """Milliseconds it takes of a step in float32, alone; None if it could not be timed outside the model."""
    half_ms: float | None
    """The same in 16 bits; None also where `apply` keeps it in float32."""
    own_error: float
    """The error it adds in 16 bits: as `LayerPrecision.own_error`."""
    fixed: str = ""
    """Why it could only be float32, if so."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrecisionAssignment(Shown):
    """The fastest dtype policies found for a model's layers, and the measurements behind them."""

    policy: Mapping[str, str]
    """A policy per layer path, for `apply`. It names the model alone where all layers have one policy."""
    reason: str
    """Why these, as a sentence."""
    layers: tuple[AssignedLayer, ...]
    """In the order in which they compute."""
    error: float
    """What the layers in 16 bits add together: the root of the sum of the squares of their own errors."""
    tolerance: float
    """As passed to `assign`."""
    report: PrecisionReport | None
    """The gate's report on `policy`; None if that is float32 alone."""
    times: Mapping[str, StepTimes]
    """Samples of the whole step: in "float32", with all layers in 16 bits (under that policy's name), "per layer"."""
    speedup: Mapping[str, Comparison]
    """How many times as fast as "float32", and as all layers in 16 bits, the step runs under `policy`."""

    @property
    def passed(self) -> bool:
        """The gate's verdict on `policy`; float32 passes."""
        return self.report is None or self.report.passed

    def to_dict(self) -> dict[str, Any]:
        """JSON, with the raw samples and null for numbers that are not finite."""
        nested = {
            "report": self.report and self.report.to_dict(),
            "layers": [asdict(layer) for layer in self.layers],
            "times": {name: times.to_dict() for name, times in self.times.items()},
            "speedup": {name: comparison.to_dict() for name, comparison in self.speedup.items()},
        }
        plain = {name: getattr(self, name) for name in ("reason", "error", "tolerance", "passed")}
        return as_json(plain | {"policy": dict(self.policy)} | nested)

    def __str__(self) -> str:
        rows = [_row(layer) for layer in self.layers]
        return "\n".join([self.reason, *aligned([_HEAD, *rows], texts=2)])


def assign(model: keras.Model, data: Any, *, tolerance: float = 0.1) -> PrecisionAssignment:
    """Finds which layers to train in 16 bits so that a step is fastest, within a tolerance of error.

    Use it where mixed precision for the whole model does not pass `check`, or is not as fast as hoped: a layer may be
    slower in 16 bits, and each change of dtype between two layers costs a cast. Each layer is timed alone on the inputs
    it has in a step, forward and backward, in both dtypes; `check` gives the error it adds. The fastest assignment is
    then timed as a whole against all layers in float32 and all in 16 bits, interleaved. It is chosen only if it passes
    `check` and is clearly faster; otherwise the answer is float32.

    The 16-bit dtype is float16 on GPUs of compute capability below 8.0, and bfloat16 elsewhere. The model comes back
    unchanged, bit for bit. It takes seconds for a few layers, minutes for hundreds; nothing else should run meanwhile.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches, of which the first three are used, or one batch: (x, y[, sample_weight]).
        tolerance: Largest error, relative to the layers' outputs, that all layers in 16 bits may add together: the root
            of the sum of the squares of their own errors. A bfloat16 layer adds about 0.003, more after batch
            normalisation. Beyond 1, `check` alone decides.

    Returns:
        The policies for `apply`, with the speed-up measured and a row per layer.

    Raises:
        TypeError, ValueError, tfopt.errors.PipelineError, tfopt.errors.UnsupportedError: As `check` does; a ValueError
            also if `tolerance` is below 0.

    Example:
        >>> found = tfopt.precision.assign(model, dataset)
        >>> print(found.reason)
        mixed_bfloat16 in 14 of 17 layers: against float32 a step runs 1.62 times as fast (95 %: 1.58–1.66); …
        >>> tfopt.precision.apply(model, found.policy)
    """
    allowed = checks.number("tolerance", tolerance, "Give a relative error such as 0.1.", least=0.0)
    require_compiled(model)
    batches = first_alike_batches(data, _BATCHES)
    dataset = reduce(tf.data.Dataset.concatenate, map(as_dataset, batches))
    half = _half_policy()
    candidates = _Candidates(model, dataset, half, batches[0])
    choice, report = candidates.fastest_that_passes(allowed)
    policies: dict[str, Policy] = {_FLOAT32: _FLOAT32, half: half}
    if mixed := report is not None and _FLOAT32 in candidates.policy_of(choice).values():
        policies[_PER_LAYER] = candidates.policy_of(choice)
    times = _measured(model, batches[0], {name: assign_policies(model, its) for name, its in policies.items()})
    eligible = [half] * candidates.takes_half_throughout(allowed) + [_PER_LAYER] * mixed
    winner = fastest_variant(times, eligible)
    if winner != _PER_LAYER:
        choice = tuple(winner == half and layer not in candidates.float32 for layer in candidates.layers)
        report = candidates.uniform if winner == half else None
    return PrecisionAssignment(
        policy=candidates.policy_of(choice),
        reason=_reason(half, winner, choice, times, eligible),
        layers=candidates.rows(choice),
        error=candidates.error_of(report) if report else 0.0,
        tolerance=allowed,
        report=report,
        times=times,
        speedup={name: _speedup(times, name, winner) for name in (_FLOAT32, half)},
    )


class _Candidates:
    """Assignments for one model, found by its layers' times and errors and judged by the gate."""

    def __init__(self, model: keras.Model, dataset: tf.data.Dataset, half: str, batch: Any):
        self._model, self._dataset, self._half = model, dataset, half
        self.uniform = passing = check(model, dataset, half)  # builds the model
        self._paths = layer_paths(model)
        self._whole = assign_policies(model, half).policies
        back: Policy = half
        if passing.fallback and half in passing.fallback.values():  # not bfloat16 in place of float16
            back = passing.fallback
            passing = check(model, dataset, back)
        reference = assign_policies(model, _FLOAT32).policies
        self._costs, self._cast_ms = measure_layers(model, batch, reference, self._whole)
        self.layers = [cost.layer for cost in self._costs]
        self.float32 = self._in_float32(back if passing.passed else _FLOAT32)
        # In the one that passes no layer suffers from an overflow before it.
        self._errors = {row.path: row.own_error for row in self.uniform.layers}
        self._errors |= {row.path: row.own_error for row in passing.layers if row.policy != _FLOAT32}

    def fastest_that_passes(self, tolerance: float) -> tuple[tuple[bool, ...], PrecisionReport | None]:
        """Which layers to put into 16 bits, with the gate's report; all in float32 if nothing passes."""
        fixed = set(self.float32)
        for _ in range(_ROUNDS):
            known = [
                LayerFacts(cost.ms or (0.0, 0.0), self._error(cost.layer), cost.layer in fixed, cost.links)
                for cost in self._costs
            ]
            choice = fastest(known, self._cast_ms, tolerance)
            if not any(choice):
                break
            report = check(self._model, self._dataset, self.policy_of(choice))
            if report.passed and self.error_of(report) <= tolerance:
                return choice, report
            for row in report.layers:  # their errors beside other layers in float32
                self._errors[row.path] = max(self._errors.get(row.path, 0.0), row.own_error)
            if not report.passed:
                fixed |= self._in_float32(report.fallback or _FLOAT32)
        return (False,) * len(self.layers), None

    def takes_half_throughout(self, tolerance: float) -> bool:
        """Whether all layers in 16 bits pass the gate within the tolerance."""
        return self.uniform.passed and self.error_of(self.uniform) <= tolerance

    def error_of(self, report: PrecisionReport) -> float:
        """The root of the sum of the squared own errors of the layers in 16 bits."""
        paths = {self._paths[layer] for layer in self.layers}
        return math.hypot(*(x.own_error for x in report.layers if x.path in paths and x.policy == self._half))

    def policy_of(self, choice: Sequence[bool]) -> dict[str, str]:
        """The mapping for `apply`."""
        if not any(choice):
            return {self._paths[self._model]: _FLOAT32}
        back = [
            self._paths[layer]
            for layer, in_half in zip(self.layers, choice, strict=True)
            # An output in 16 bits now does not pass the gate unless it is named.
            if not in_half and layer in self._whole and any(map(is_16_bit, (self._whole[layer], current_policy(layer))))
        ]
        return {self._paths[self._model]: self._half} | dict.fromkeys(back, _FLOAT32)

    def rows(self, choice: Sequence[bool]) -> tuple[AssignedLayer, ...]:
        """A row per layer."""
        return tuple(
            AssignedLayer(
                path=self._paths[cost.layer],
                kind=type(cost.layer).__name__,
                policy=self._half if in_half else _FLOAT32,
                float32_ms=cost.ms and cost.ms[0],
                half_ms=cost.ms[1] if cost.ms and self._changes(cost.layer) else None,
                own_error=self._error(cost.layer),
                fixed=self._why_fixed(cost.layer),
            )
            for cost, in_half in zip(self._costs, choice, strict=True)
        )

    def _error(self, layer: keras.Layer) -> float:
        return self._errors.get(self._paths[layer], 0.0)

    def _changes(self, layer: keras.Layer) -> bool:
        """Whether `apply` would put it into 16 bits."""
        return layer in self._whole and is_16_bit(self._whole[layer])

    def _in_float32(self, policy: Policy) -> set[keras.Layer]:
        given = assign_policies(self._model, policy).policies
        return {layer for layer in self.layers if layer not in given or not is_16_bit(given[layer])}

    def _why_fixed(self, layer: keras.Layer) -> str:
        if layer not in self.float32:
            return ""
        return "does not pass check" if self._changes(layer) else "apply keeps it in float32"


def fastest_variant(times: Mapping[str, StepTimes], eligible: Sequence[str]) -> str:
    """The name of the fastest: float32, unless an eligible one is clearly faster."""
    best = _FLOAT32
    for name in eligible:
        if compare(times[best], times[name]).verdict == "faster":
            best = name
    return best


def _half_policy() -> str:
    capabilities = [gpu.compute_capability for gpu in hardware.gpus() if gpu.compute_capability]
    return "mixed_float16" if capabilities and min(capabilities) < (8, 0) else "mixed_bfloat16"


def _measured(model: keras.Model, batch: Any, variants: Mapping[str, Assignment]) -> dict[str, StepTimes]:
    """The whole step under each assignment, in turn, for longer where the machine is too noisy to tell."""
    timers = {name: _timer(model, batch, assigned) for name, assigned in variants.items()}
    slowest = max(timer(3, samples=1).median_ms for timer in timers.values())
    steps = _BLOCKS * max(1, min(_MOST_STEPS, round(_BLOCK_MS / slowest)))
    blocks = {name: partial(timer, steps, warmup=1, samples=_BLOCKS) for name, timer in timers.items()}
    times = interleave(blocks, _TURNS)
    for _ in range(_MORE_TIMES):
        if all(compare(times[_FLOAT32], its).verdict != "too noisy to tell" for its in times.values()):
            break
        more = interleave(blocks, _TURNS)
        times = {name: replace(its, repeats_ms=its.repeats_ms + more[name].repeats_ms) for name, its in times.items()}
    return times


def _timer(model: keras.Model, batch: Any, assigned: Assignment) -> StepTimer:
    """A timer of the step under other policies, with the loss scaled where `apply` would scale it."""
    with under_policies(model, assigned.policies):
        if not computes_in_float16(model) or isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            return StepTimer(model, batch)
        compiled = model._compile_config.config
        given = compiled["optimizer"]
        scale_loss(model)
        try:
            return StepTimer(model, batch)
        finally:
            unscale_loss(model)
            compiled["optimizer"] = given


def _speedup(times: Mapping[str, StepTimes], baseline: str, winner: str) -> Comparison:
    if baseline == winner:
        return Comparison(ratio=1.0, interval=(1.0, 1.0))
    return compare(times[baseline], times[winner])


def _reason(
    half: str, winner: str, choice: Sequence[bool], times: Mapping[str, StepTimes], eligible: Sequence[str]
) -> str:
    if winner == _FLOAT32:
        tried = [f"{_named(name, half)} runs {compare(times[_FLOAT32], times[name])}" for name in eligible]
        return f"float32 throughout: {'; '.join(tried) or 'no layer in 16 bits passes check within the tolerance'}."
    against = f"against float32 a step runs {compare(times[_FLOAT32], times[winner])}"
    if winner == _PER_LAYER:
        against += f"; against {_named(half, half)}, {compare(times[half], times[winner])}"
    return f"{half} in {sum(choice)} of {len(choice)} layers: {against}."


def _named(variant: str, half: str) -> str:
    return f"{half} {'in some layers' if variant == _PER_LAYER else 'throughout'}"


def _row(layer: AssignedLayer) -> tuple[str, ...]:
    times = ["" if ms is None else f"{ms:.3g} ms" for ms in (layer.float32_ms, layer.half_ms)]
    return layer.path, layer.kind, *times, percent(layer.own_error), layer.policy, layer.fixed
