"""A policy compared with float32 on a few batches, and the report of it."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import keras
import numpy as np

from tfopt.errors import UnsupportedError
from tfopt.measure import preserved
from tfopt.measure.draws import without_dropout
from tfopt.precision.deviation import not_finite, summed_up
from tfopt.precision.float8 import quantized_clone, split
from tfopt.precision.judging import Evidence, cancelled, first_overflow, problems
from tfopt.precision.layers import Policy, asked_for, layer_paths, present, resolved
from tfopt.precision.loss_scaling import scale_loss
from tfopt.precision.outputs import output_layers
from tfopt.precision.probing import Measured, Probe, Row, Side
from tfopt.precision.report import LayerPrecision, PrecisionReport
from tfopt.precision.tf32 import tf32

# Keras' LossScaleOptimizer starts there.
_INITIAL_SCALE = 2.0**15
_16_BIT = ("float16", "bfloat16")
# A float8 layer takes its scales from the steps before: the first one has none, the second the first one's.
_FLOAT8_STEPS = 3


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
        ValueError, tfopt.errors.UnsupportedError: The policy is unknown, or the model does not compute under it.
        NotFiniteError: Float32 is not finite.
    """
    exact = Side(model, resolved(model, "float32"))
    with without_dropout(model), tf32(False), _candidate(model, batches, policy) as candidate:
        paths = layer_paths(candidate.model)
        policies = {path: candidate.policies.get(layer, present(layer)) for layer, path in paths.items()}
        probe = _probe(exact, candidate, batches[0], policy)
        with preserved(model, also=probe.variables):
            measured, scale = _measured(probe, batches, _first_scale(model, policies))
        heads = _heads(candidate, policies) if probe.has_16_bit_output else ()
        layers, softmaxes = _layers(
            probe.rows, measured, {path: type(x).__name__ for x, path in paths.items()}, policies
        )
    evidence = Evidence(
        layers=layers,
        policies=policies,
        heads=heads,
        softmaxes=tuple(path for path in softmaxes if path not in heads),
        reference_loss=float(np.mean([one.reference_loss for one in measured])),
        candidate_loss=float(np.mean([one.candidate_loss for one in measured])),
    )
    return _judged(evidence, _notes(model, probe, layers), described(policy), scale, len(batches))


def described(policy: Policy) -> str:
    """A policy in words."""
    if not isinstance(policy, Mapping):
        return policy if isinstance(policy, str) else str(policy.name)
    names = sorted({value if isinstance(value, str) else str(value.name) for value in map(policy.__getitem__, policy)})
    return f"a policy for each layer ({', '.join(names)})" if names else "the model as it stands"


def essence(error: BaseException) -> str:
    """What an error of Keras or TensorFlow says, without the colours, arguments and places in it."""
    where = ("Graph execution error", "Detected at node", "File ", "Stack trace", "[[{{node")
    text = re.sub(r"\x1b\[\d*m", "", str(error).split("Arguments received")[0])
    said = " ".join(line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(where))
    return said.replace("Exception encountered when calling ", "in ").strip(" .") or type(error).__name__


@contextmanager
def _candidate(model: keras.Model, batches: Sequence[Any], policy: Policy) -> Iterator[Side]:
    """The model under the policy; where it asks for float8, which cannot be taken back, a clone."""
    base, quantized = split(model, policy)
    policies = resolved(model, base)  # refuses what cannot be, before a clone is made
    if not quantized:
        yield Side(model, policies | _standing_heads(model, base, policies))
        return
    with preserved(model):  # a clone's training may advance the seed that all models share
        clone = quantized_clone(model, policy)
        with without_dropout(clone):
            _settle(clone, batches)
            yield Side(clone, {})


def _standing_heads(
    model: keras.Model, policy: Policy, policies: Mapping[keras.Layer, keras.DTypePolicy]
) -> dict[keras.Layer, keras.DTypePolicy]:
    """Layers that make outputs in 16 bits now and that only `apply` would take to float32: to be seen, not mended."""
    asked, _ = asked_for(model, policy, layer_paths(model))
    changed = [layer for layer, its in policies.items() if its.compute_dtype != asked[layer].compute_dtype]
    return {layer: asked[layer] for layer in changed if present(layer).compute_dtype in _16_BIT}


def _settle(clone: keras.Model, batches: Sequence[Any]) -> None:
    """Trains a quantized clone until its scales fit, and puts back its weights."""
    kept = [variable for variable in clone.variables if not getattr(variable, "overwrite_with_gradient", False)]
    values = [variable.numpy() for variable in kept]
    if any(present(layer).compute_dtype == "float16" for layer in clone._flatten_layers()):
        scale_loss(clone)  # the gradients that it sees later are scaled, too
    for batch in islice(cycle(batches), max(_FLOAT8_STEPS, len(batches))):
        clone.train_on_batch(*keras.utils.unpack_x_y_sample_weight(batch))
    for variable, value in zip(kept, values, strict=True):
        variable.assign(value)


def _probe(exact: Side, candidate: Side, batch: Any, policy: Policy) -> Probe:
    try:
        return Probe(exact, candidate, batch)
    except Exception as error:  # whatever the user's layers raise on tensors of this dtype
        raise UnsupportedError(
            f"Expected a model that computes under {described(policy)}. Found: {essence(error)}. Leave the layers "
            'concerned out of a policy for each layer, such as {"encoder/.*": "mixed_bfloat16"}.'
        ) from error


def _first_scale(model: keras.Model, policies: Mapping[str, keras.DTypePolicy]) -> float:
    """What training would multiply the loss by."""
    if all(policy.compute_dtype != "float16" for policy in policies.values()):
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


def _layers(
    rows: Sequence[Row],
    measured: Sequence[Measured],
    kinds: Mapping[str, str],
    policies: Mapping[str, keras.DTypePolicy],
) -> tuple[tuple[LayerPrecision, ...], tuple[str, ...]]:
    """A layer for each path, in the order of the rows; and the softmaxes that are the model's answer."""
    places: dict[Row, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row, []).append(place)
    parts: dict[str, dict[str, Any]] = {}
    for row, where in places.items():
        parts.setdefault(row.path, {})[row.role] = summed_up([one.moments[where] for one in measured])
    answers = {path: found.pop("answer") for path, found in parts.items() if "answer" in found}
    softmaxes = tuple(path for path, part in answers.items() if part.norm and not part.error and not part.overflow)
    layers = tuple(
        LayerPrecision(path=path, kind=kinds[path], policy=policies[path].name, **found)
        for path, found in parts.items()
    )
    return layers, softmaxes


def _heads(candidate: Side, policies: Mapping[str, keras.DTypePolicy]) -> tuple[str, ...]:
    """The layers that make the model's outputs in 16 bits; the model itself where they cannot be told."""
    paths = layer_paths(candidate.model)
    try:
        making = output_layers(candidate.model)
    except UnsupportedError:
        making = frozenset()
    found = [path for x, path in paths.items() if x in making and policies[path].compute_dtype in _16_BIT]
    outermost = [path for path in found if path.rpartition("/")[0] not in found]
    return tuple(outermost) or (candidate.model.name,)


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
    found = problems(evidence)
    blamed = {path for problem in found for path in problem.blamed}
    report = PrecisionReport(
        policy=policy,
        problems=tuple(problem.sentence for problem in found),
        notes=tuple(notes),
        layers=tuple(replace(layer, blamed=layer.path in blamed) for layer in evidence.layers),
        first_overflow=first_overflow(evidence.layers),
        fallback=None if found else {},
        reference_loss=evidence.reference_loss,
        candidate_loss=evidence.candidate_loss,
        loss_scale=scale,
        batches=batches,
    )
    back = dict.fromkeys(path for problem in found for path in problem.back)
    return Compared(report, dict(evidence.policies), tuple(back))
