"""A policy compared with float32 on a few batches, and the report of it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.measure import preserved
from tfopt.measure.draws import without_dropout
from tfopt.model.layers import layer_paths
from tfopt.model.outputs import output_layers
from tfopt.precision.deviation import Deviation, not_finite, summed_up
from tfopt.precision.judging import Evidence, cancelled, drift_limit, first_overflow, problems
from tfopt.precision.layer_policies import Policy, present
from tfopt.precision.policy_names import is_16_bit
from tfopt.precision.probing import Measured, Probe, Row, Side
from tfopt.precision.report import LayerPrecision, PrecisionReport
from tfopt.precision.sides import candidate_side, described, exact_side, refusal, refusing
from tfopt.precision.tf32 import tf32
from tfopt.repairs import computing_layers

# Keras' LossScaleOptimizer starts there.
_INITIAL_SCALE = 2.0**15


class Compared(NamedTuple):
    """A report without a fallback, the policy of each layer by path, and the layers to take back to float32 first."""

    report: PrecisionReport
    policies: dict[str, keras.DTypePolicy]
    back: tuple[str, ...]


class NotFiniteError(Exception):
    """Float32 itself gives no finite loss or gradient: holds the first layer whose output is not finite, or None."""


def compare(model: keras.Model, batches: Sequence[Any], policy: Policy) -> Compared:
    """Computes batches in float32 and under a policy, and judges the difference; the model comes back as it was.

    Raises:
        TypeError, ValueError, tfopt.errors.UnsupportedError: The policy is unknown, or the model does not compute under
            it, or not in float32.
        NotFiniteError: Float32 is not finite.
        tf.errors.OpError: Float32 cannot be computed for these batches.
    """
    exact = exact_side(model)
    try:
        return _compared(exact, batches, policy)
    except tf.errors.ResourceExhaustedError:
        raise
    except tf.errors.OpError as error:
        alone = Probe(exact, exact, batches[0])
        with preserved(model, also=alone.variables):
            for batch in batches:
                alone(batch, 1.0)  # where this raises too, it is no matter of the policy
        raise refusal(policy, error) from error


def _compared(exact: Side, batches: Sequence[Any], policy: Policy) -> Compared:
    model = exact.model
    with without_dropout(model), tf32(False), candidate_side(model, batches, policy) as candidate:
        paths = layer_paths(candidate.model)
        policies = {path: candidate.policies.get(layer, present(layer)) for layer, path in paths.items()}
        computing = [policies[paths[layer]] for layer in computing_layers(candidate.model)]
        with refusing(policy):
            probe = Probe(exact, candidate, batches[0])
        with preserved(model, also=probe.variables):
            measured, scale = _measured(probe, batches, _first_scale(model, computing))
        heads = _heads(candidate, policies) if probe.has_16_bit_output else ()
    kinds = {path: type(layer).__name__ for layer, path in paths.items()}
    calls = _deviations(probe.rows, measured, lambda row: (row.path, row.call))
    layers = _deviations(probe.rows, measured, lambda row: (row.path, 0))
    softmaxes = [path for (path, _), found in layers.items() if _is_equal(found.get("answer"))]
    evidence = Evidence(
        calls=_figures(calls, kinds, policies),
        layers=_figures(layers, kinds, policies),
        policies=policies,
        heads=heads,
        softmaxes=tuple(path for path in softmaxes if path not in heads),
        reference_loss=float(np.mean([one.reference_loss for one in measured])),
        candidate_loss=float(np.mean([one.candidate_loss for one in measured])),
        drift_limit=drift_limit(computing),
    )
    return _judged(evidence, _notes(model, probe, evidence.layers), described(policy), scale, len(batches))


def _first_scale(model: keras.Model, computing: Iterable[keras.DTypePolicy]) -> float:
    """What training would multiply the loss by, under the policies of what computes."""
    if all(policy.compute_dtype != "float16" for policy in computing):
        return 1.0
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _INITIAL_SCALE
    return float(optimizer.dynamic_scale.numpy()) if optimizer.built else float(optimizer.initial_scale)


def _measured(probe: Probe, batches: Sequence[Any], scale: float) -> tuple[list[Measured], float]:
    """The batches, with the loss scaled as LossScaleOptimizer would: halved for as long as a gradient overflows."""
    weights = [row.role == "weight_gradient" for row in probe.rows]
    measured = []
    for batch in batches:
        one = probe(batch, scale)
        while scale > 1 and math.isfinite(one.candidate_loss) and summed_up([one.moments[weights]]).overflow:
            scale /= 2
            one = probe(batch, scale)
        if not math.isfinite(one.reference_loss) or not_finite(one.moments[weights]):
            outputs = [i for i, row in enumerate(probe.rows) if row.role == "output"]
            raise NotFiniteError(next((probe.rows[i].path for i in outputs if not_finite(one.moments[[i]])), None))
        measured.append(one)
    return measured, scale


def _deviations(
    rows: Sequence[Row], measured: Sequence[Measured], of: Callable[[Row], tuple[str, int]]
) -> dict[tuple[str, int], dict[str, Deviation]]:
    """The deviation of each role, of the rows that `of` says the same of as one."""
    places: dict[tuple[tuple[str, int], str], list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault((of(row), row.role), []).append(place)
    found: dict[tuple[str, int], dict[str, Deviation]] = {}
    for (what, role), where in places.items():
        found.setdefault(what, {})[role] = summed_up([one.moments[where] for one in measured])
    return found


def _figures(
    found: Mapping[tuple[str, int], Mapping[str, Any]],
    kinds: Mapping[str, str],
    policies: Mapping[str, keras.DTypePolicy],
) -> tuple[LayerPrecision, ...]:
    return tuple(
        LayerPrecision(
            path=path,
            kind=kinds[path],
            policy=policies[path].name,
            **{role: part for role, part in parts.items() if role != "answer"},
        )
        for (path, _), parts in found.items()
    )


def _is_equal(answer: Deviation | None) -> bool:
    """Whether a softmax is the model's answer: the same values."""
    return bool(answer and answer.norm and not answer.error and not answer.overflow)


def _heads(candidate: Side, policies: Mapping[str, keras.DTypePolicy]) -> tuple[str, ...]:
    """The layers that make the model's outputs in 16 bits; the model itself where they cannot be told."""
    paths = layer_paths(candidate.model)
    try:
        making = output_layers(candidate.model)
    except UnsupportedError:
        making = frozenset()
    found = [path for x, path in paths.items() if x in making and is_16_bit(policies[path])]
    outermost = [path for path in found if path.rpartition("/")[0] not in found]
    return tuple(outermost) or (paths[candidate.model],)


def _notes(model: keras.Model, probe: Probe, layers: Sequence[LayerPrecision]) -> Iterator[str]:
    if type(model).train_step is not keras.Model.train_step:
        yield (
            "The model has a train_step of its own, which is not run here: compared are its call, compute_loss and "
            "their gradients."
        )
    if probe.draws_differ:
        yield "The model draws other random numbers in each dtype, beyond dropout: the errors are partly theirs."
    if probe.assigns:
        yield "The model assigns to a tf.Variable, so each dtype starts from another state: the errors are partly that."
    gradients = [(layer.weight_gradient, layer.output_gradient) for layer in layers]
    noisy = [part for part, of in gradients if part and part.error > 1 and not cancelled(part, of)]
    if noisy:
        yield (
            f"Rounding turns the gradients of {len(noisy)} layers away from float32's by more than their own size, as "
            "deep batch-normalised nets do before they are trained. It acts as noise; compare the accuracy trained to."
        )


def _judged(evidence: Evidence, notes: Iterator[str], policy: str, scale: float, batches: int) -> Compared:
    found, root = problems(evidence), first_overflow(evidence.calls)
    blamed = {path for problem in found for path in problem.blamed}
    report = PrecisionReport(
        policy=policy,
        problems=tuple(problem.sentence for problem in found),
        notes=tuple(notes),
        layers=tuple(replace(layer, blamed=layer.path in blamed) for layer in evidence.layers),
        first_overflow=root.path if root else None,
        fallback=None if found else {},
        reference_loss=evidence.reference_loss,
        candidate_loss=evidence.candidate_loss,
        loss_scale=scale,
        batches=batches,
    )
    back = dict.fromkeys(path for problem in found for path in problem.back)
    return Compared(report, dict(evidence.policies), tuple(back))
