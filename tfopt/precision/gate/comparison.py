"""A model under a policy against the same model in float32: measured on a few batches, tabulated and judged."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError, summarize_error
from tfopt.model.layers import layer_paths
from tfopt.model.outputs import output_layers
from tfopt.model.state import preserved, without_dropout
from tfopt.precision.float8 import quantized_clone, split_float8
from tfopt.precision.gate.layer_table import LayerPrecision, LayerTable, not_finite, worst_deviation
from tfopt.precision.gate.precision_report import PrecisionReport
from tfopt.precision.gate.probe import Measurement, Probe, Row, Variant
from tfopt.precision.gate.verdict import cancelled, drift_limit, find_problems
from tfopt.precision.layer_policies import Policy, current_policy, policies_asked_for, resolve_policies
from tfopt.precision.loss_scale_wrapper import scale_loss
from tfopt.precision.policies import is_16_bit, name_of, tf32
from tfopt.repairs import computes_in_float16, computing_layers

# Where Keras' LossScaleOptimizer starts.
_INITIAL_SCALE = 2.0**15
# A float8 layer takes its scales from earlier steps: the first has none, the second uses the first one's.
_FLOAT8_STEPS = 3


class NotFiniteError(Exception):
    """Float32 itself gives no finite loss or gradient; holds the first layer whose output is not finite, or None."""


class Comparison(NamedTuple):
    """What a comparison found."""

    report: PrecisionReport
    """Without a fallback."""
    policies: Mapping[str, keras.DTypePolicy]
    """The policy of every layer by path."""
    to_float32: tuple[str, ...]
    """The layers to take back to float32 first."""


def compare(model: keras.Model, batches: Sequence[Any], policy: Policy) -> Comparison:
    """Compares a policy with float32 on some batches, leaving the model unchanged.

    Raises NotFiniteError if float32 is not finite, and tf.errors.OpError if it cannot be computed for these batches.
    """
    reference = _in_float32(model)
    try:
        return _compare(reference, batches, policy)
    except tf.errors.ResourceExhaustedError:
        raise
    except tf.errors.OpError as error:
        alone = Probe(reference, reference, batches[0])
        with preserved(model, also=alone.variables):
            for batch in batches:
                alone(batch, 1.0)  # if this raises too, the policy is not at fault
        raise _does_not_compute(policy, error) from error


def _compare(reference: Variant, batches: Sequence[Any], policy: Policy) -> Comparison:
    model = reference.model
    with without_dropout(model), tf32(False), _under_policy(model, batches, policy) as candidate:
        paths = layer_paths(candidate.model)
        policies = {path: candidate.policies.get(layer, current_policy(layer)) for layer, path in paths.items()}
        computing = [policies[paths[layer]] for layer in computing_layers(candidate.model)]
        with _refused_if_untraceable(policy):
            probe = Probe(reference, candidate, batches[0])
        with preserved(model, also=probe.variables):
            measured, scale = _measure(probe, batches, _first_scale(model, computing))
        heads = _16_bit_heads(candidate.model, policies) if probe.has_16_bit_output else ()
    kinds = {path: type(layer).__name__ for layer, path in paths.items()}
    table = LayerTable(
        calls=_rows(probe.rows, measured, kinds, policies),
        layers=_rows([row._replace(call=0) for row in probe.rows], measured, kinds, policies),
        policies=policies,
        heads=heads,
        softmaxes=tuple(path for path in _answering_softmaxes(probe.rows, measured) if path not in heads),
        reference_loss=float(np.mean([one.reference_loss for one in measured])),
        candidate_loss=float(np.mean([one.candidate_loss for one in measured])),
        drift_limit=drift_limit(computing),
    )
    problems = find_problems(table)
    blamed = {path for problem in problems for path in problem.blamed}
    report = PrecisionReport(
        policy=_described(policy),
        problems=tuple(problem.sentence for problem in problems),
        notes=tuple(_notes(model, probe, table.layers)),
        layers=tuple(replace(layer, blamed=layer.path in blamed) for layer in table.layers),
        first_overflow=table.first_overflow.path if table.first_overflow else None,
        fallback=None if problems else {},
        reference_loss=table.reference_loss,
        candidate_loss=table.candidate_loss,
        loss_scale=scale,
        batches=len(batches),
    )
    to_float32 = dict.fromkeys(path for problem in problems for path in problem.to_float32)
    return Comparison(report, policies, tuple(to_float32))


def _in_float32(model: keras.Model) -> Variant:
    try:
        return Variant(model, resolve_policies(model, "float32"))
    except UnsupportedError as error:
        raise UnsupportedError(
            f"Expected a model that can compute in float32, the reference. Found {model.name!r} with quantized layers "
            "or with weights that are not float32. Check a model made under float32 or a mixed policy, with the same "
            "weights; check float8 before it is applied."
        ) from error


@contextmanager
def _under_policy(model: keras.Model, batches: Sequence[Any], policy: Policy) -> Iterator[Variant]:
    """The model under the policy, or a clone if the policy asks for float8, which cannot be taken back."""
    base, quantized = split_float8(model, policy)
    policies = resolve_policies(model, base)
    if not quantized:
        yield Variant(model, policies | _present_heads(model, base, policies))
        return
    with preserved(model):  # training a clone may advance the seed that all models share
        clone = quantized_clone(model, policies, quantized)
        with without_dropout(clone):
            _settle_scales(clone, batches, policy)
            yield Variant(clone, {})


def _present_heads(
    model: keras.Model, policy: Policy, policies: Mapping[keras.Layer, keras.DTypePolicy]
) -> dict[keras.Layer, keras.DTypePolicy]:
    """Output layers in 16 bits now, which `apply` would put into float32: the check must see them as they are."""
    asked, _ = policies_asked_for(model, policy)
    changed = [layer for layer, its in policies.items() if its.compute_dtype != asked[layer].compute_dtype]
    return {layer: asked[layer] for layer in changed if is_16_bit(current_policy(layer))}


def _settle_scales(clone: keras.Model, batches: Sequence[Any], policy: Policy) -> None:
    """Trains a quantized clone until its scales fit, and restores its weights."""
    kept = [variable for variable in clone.variables if not getattr(variable, "overwrite_with_gradient", False)]
    values = [variable.numpy() for variable in kept]
    if computes_in_float16(clone):
        scale_loss(clone)  # since the gradients compared later are scaled too
    clone.optimizer.build(clone.trainable_variables)
    # Keras' own step: a custom one may train anything, and is not what is compared later.
    step = tf.function(partial(keras.Model.train_step, clone), autograph=False)
    with _refused_if_untraceable(policy):
        step.get_concrete_function(batches[0])
    for batch in islice(cycle(batches), max(_FLOAT8_STEPS, len(batches))):
        step(batch)
    for variable, value in zip(kept, values, strict=True):
        variable.assign(value)


@contextmanager
def _refused_if_untraceable(policy: Policy) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the user's layers raise on tensors of this dtype
        raise _does_not_compute(policy, error) from error


def _does_not_compute(policy: Policy, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"Expected a model that computes under {_described(policy)}. Found: {summarize_error(error)}. Exclude the "
        'layers concerned with a policy per layer, such as {"encoder/.*": "mixed_bfloat16"}.'
    )


def _described(policy: Policy) -> str:
    if not isinstance(policy, Mapping):
        return name_of(policy)
    names = sorted({name_of(policy[key]) for key in policy})
    return f"a policy per layer ({', '.join(names)})" if names else "the model as it stands"


def _first_scale(model: keras.Model, computing: Iterable[keras.DTypePolicy]) -> float:
    """What training would multiply the loss by, given the policies of the layers that compute."""
    if all(policy.compute_dtype != "float16" for policy in computing):
        return 1.0
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _INITIAL_SCALE
    return float(optimizer.dynamic_scale.numpy()) if optimizer.built else float(optimizer.initial_scale)


def _measure(probe: Probe, batches: Sequence[Any], scale: float) -> tuple[list[Measurement], float]:
    """Runs the batches, with the loss scale halved while a gradient overflows, as LossScaleOptimizer does."""
    weights = [row.role == "weight_gradient" for row in probe.rows]
    measured = []
    for batch in batches:
        one = probe(batch, scale)
        while scale > 1 and math.isfinite(one.candidate_loss) and worst_deviation([one.moments[weights]]).overflow:
            scale /= 2
            one = probe(batch, scale)
        if not math.isfinite(one.reference_loss) or not_finite(one.moments[weights]):
            outputs = [i for i, row in enumerate(probe.rows) if row.role == "output"]
            raise NotFiniteError(next((probe.rows[i].path for i in outputs if not_finite(one.moments[[i]])), None))
        measured.append(one)
    return measured, scale


def _rows(
    rows: Sequence[Row],
    measured: Sequence[Measurement],
    kinds: Mapping[str, str],
    policies: Mapping[str, keras.DTypePolicy],
) -> tuple[LayerPrecision, ...]:
    """A row of the table per path and call, with a deviation per role."""
    places: dict[tuple[str, int], dict[str, list[int]]] = {}
    for place, row in enumerate(rows):
        roles = places.setdefault((row.path, row.call), {})
        if row.role != "answer":
            roles.setdefault(row.role, []).append(place)

    def layer_row(path: str, roles: Mapping[str, list[int]]) -> LayerPrecision:
        parts: Any = {role: worst_deviation([one.moments[at] for one in measured]) for role, at in roles.items()}
        return LayerPrecision(path=path, kind=kinds[path], policy=policies[path].name, **parts)

    return tuple(layer_row(path, roles) for (path, _), roles in places.items())


def _answering_softmaxes(rows: Sequence[Row], measured: Sequence[Measurement]) -> Iterator[str]:
    """Paths of 16-bit softmaxes with the values of the model's output."""
    for path in dict.fromkeys(row.path for row in rows if row.role == "answer"):
        where = [place for place, row in enumerate(rows) if (row.path, row.role) == (path, "answer")]
        answer = worst_deviation([one.moments[where] for one in measured])
        if answer.norm and not answer.error and not answer.overflow:
            yield path


def _16_bit_heads(model: keras.Model, policies: Mapping[str, keras.DTypePolicy]) -> tuple[str, ...]:
    """The layers that make the model's outputs in 16 bits, or the model itself if they cannot be found."""
    paths = layer_paths(model)
    try:
        making = output_layers(model)
    except UnsupportedError:
        making = frozenset()
    found = [path for layer, path in paths.items() if layer in making and is_16_bit(policies[path])]
    outermost = [path for path in found if path.rpartition("/")[0] not in found]
    return tuple(outermost) or (paths[model],)


def _notes(model: keras.Model, probe: Probe, layers: Sequence[LayerPrecision]) -> Iterator[str]:
    if type(model).train_step is not keras.Model.train_step:
        yield (
            "The model has a custom train_step, which was not run: its call, compute_loss and their gradients were "
            "compared."
        )
    if probe.draws_differ:
        yield "The model draws different random numbers in each dtype, beyond dropout; part of the error is theirs."
    if probe.assigns:
        yield "The model assigns to a tf.Variable, so each dtype starts from another state; part of the error is that."
    gradients = [(layer.weight_gradient, layer.output_gradient) for layer in layers]
    noisy = [part for part, source in gradients if part and part.error > 1 and not cancelled(part, source)]
    if noisy:
        yield (
            f"Rounding turns the gradients of {len(noisy)} layers away from float32's by more than their own norm, as "
            "in deep batch-normalised nets before training. It acts as noise; compare the accuracy after training."
        )
