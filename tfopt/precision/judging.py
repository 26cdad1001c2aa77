"""What counts as a problem of a dtype policy: the thresholds of the precision gate, and what it says about them."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import keras

from tfopt.precision.deviation import Deviation
from tfopt.precision.report import LayerPrecision, percent, relative
from tfopt.text import listed

# Any overflow is one too many. Of underflow, Micikevicius et al. ("Mixed Precision Training", ICLR 2018, section 3.2)
# count values that become zero, and find that many of them do no harm: so their norm counts here. Measured on the
# weight gradients of healthy nets: up to 2 %, since ReLU units that are near zero flip between dtypes.
LOST = 0.1
# Outputs of ReLU lose more to such flips: 71 % if both dtypes had nothing to do with each other, measured 20 %.
LOST_OUTPUT = 0.9
# Deep batch-normalised nets amplify rounding: at initialisation the gradient of ResNet-50 in bfloat16 has float32's
# size and hardly its direction (measured: an error of 1.5; 1.41 would be unrelated), and the output of its last layers
# is off by 0.7. Yet such nets train to the same accuracy (Micikevicius et al., table 1; Kalamkar et al., "A Study of
# BFLOAT16 for Deep Learning Training", 2019), for it is noise, as that of a batch is. What is beyond is not rounding.
WRONG = 2.0
# A gradient must also be off by this much of the norm of all: what is next to zero in float32, as behind a saturated
# softmax, has large relative errors that change nothing.
MATTERS = 0.01
# How far the loss may be off, in roundings of the dtype: 3 % in float16, 25 % in bfloat16. Measured on healthy nets: up
# to 1 % and 12 % (ResNet-50 at initialisation, on noise), with a few layers below 0.1 % and 1 %.
DRIFT_ROUNDINGS = 32
# float8's E4M3 has 3 bits of mantissa (NVIDIA, "Using FP8 with Transformer Engine"): 32 roundings would bound nothing.
FLOAT8_DRIFT = 0.5
# Eight roundings of float32. What is this small beside what it is computed from is what rounding leaves of a sum that
# is zero, such as the gradient of a bias before batch normalisation.
_CANCELLED = 8 * 2.0**-23
_ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the verdict rests on.

    Attributes:
        calls: Every call of a layer, in the order in which they end, without gradients of weights.
        layers: Every layer, its calls as one.
        policies: The policies of layers by path, of those without a row, too.
        heads: Paths of layers that make the model's outputs in 16 bits, the model's own where an operation does.
        softmaxes: Paths of softmaxes in 16 bits whose result becomes the model's output in another dtype.
        reference_loss: In float32.
        candidate_loss: Under the policy.
        drift_limit: How far that may be from the one in float32, relative to it.
    """

    calls: tuple[LayerPrecision, ...]
    layers: tuple[LayerPrecision, ...]
    policies: Mapping[str, keras.DTypePolicy]
    heads: tuple[str, ...]
    softmaxes: tuple[str, ...]
    reference_loss: float
    candidate_loss: float
    drift_limit: float

    def dtype(self, path: str) -> str:
        """What a layer computes in."""
        return str(self.policies[path].compute_dtype)

    @property
    def suspects(self) -> list[str]:
        """The layers not in float32 whose own errors are largest, worst first: an eighth, so that rounds add up."""
        changed = [x for x in self.layers if self.dtype(x.path) != "float32" or self.policies[x.path].quantization_mode]
        ranked = sorted(changed, key=lambda layer: layer.own_error, reverse=True)
        return [layer.path for layer in ranked[: -(-len(ranked) // 8)]]


@dataclass(frozen=True, slots=True)
class Problem:
    """A sentence for the reader; the layers it names, and those to take back to float32 for it, worst first."""

    sentence: str
    blamed: tuple[str, ...]
    back: tuple[str, ...]


def problems(evidence: Evidence) -> list[Problem]:
    """Judges the evidence, the gravest problem first; there is none if the policy passes."""
    # What an overflow or a wrong output brings about further on are not problems of their own.
    found = [*_overflow(evidence)] or [*_outputs(evidence)] or [*_gradient_overflow(evidence)]
    return [*(found or [*_lost(evidence), *_wrong(evidence), *_drift(evidence)]), *_heads(evidence)]


def first_overflow(calls: Iterable[LayerPrecision]) -> LayerPrecision | None:
    """The first call whose output is not finite where float32's is."""
    return next((call for call in calls if _overflows(call.output)), None)


def cancelled(part: Deviation, of: Deviation | None) -> bool:
    """Whether something is zero but for rounding in float32 itself, beside what it is computed from."""
    return of is not None and part.norm <= _CANCELLED * of.norm


def _overflow(evidence: Evidence) -> Iterator[Problem]:
    root = first_overflow(evidence.calls)
    reaches = {layer.path: _reaches(layer) for layer in evidence.layers}
    beyond = [path for path, value in reaches.items() if value > _LARGEST.get(evidence.dtype(path), math.inf)]
    if root is not None and root.output:
        first, dtype = root.path, evidence.dtype(root.path)
        inside = "" if first in beyond else " inside"
        others = [path for path in beyond if path != first]
        yield Problem(
            f"{first!r} overflows{inside}, the first layer to do so: {percent(root.output.overflow)} of its output in "
            f"{dtype}, which ends at {_LARGEST.get(dtype, math.inf):.5g}, while float32 reaches {_reaches(root):.3g}. "
            + (f"{_listed(others)} would overflow, too. " if others else "")
            + "Keep it in float32, or scale its values down.",
            (first, *others),
            (first, *others),
        )
    elif not math.isfinite(evidence.candidate_loss):
        yield Problem(
            f"The loss is {evidence.candidate_loss}, and {evidence.reference_loss:.4g} in float32, though no layer's "
            "output overflows. Compute what lies between the layers and the loss in float32.",
            (),
            tuple(beyond) or tuple(evidence.suspects),
        )


def _gradient_overflow(evidence: Evidence) -> Iterator[Problem]:
    reached = [layer.path for layer in evidence.layers[::-1] if _overflows(layer.weight_gradient)]
    if not reached:
        return
    # It begins where what comes is finite, and what goes on is not.
    began = [
        call.path
        for call in evidence.calls[::-1]
        if not _overflows(call.output_gradient) and (_overflows(call.input_gradient) or call.path in reached)
    ]
    first = (began or reached)[0]
    yield Problem(
        f"Gradients overflow even where the loss is not scaled, on their way back first at {first!r}. "
        "Keep it in float32, or make the loss smaller.",
        (first,),
        tuple(began or reached),
    )


def _outputs(evidence: Evidence) -> Iterator[Problem]:
    named = set()
    for call in evidence.calls:
        output, given = call.output, call.input
        # One that takes in what is wrong already is not where it comes from.
        if not output or _is_wrong(given) or not _is_wrong(output) or cancelled(output, given) or call.path in named:
            continue
        named.add(call.path)
        what = (
            f"loses {percent(output.lost)} of its norm to zeros, with values of at most {output.largest:.2g} in float32"
            if output.lost > LOST_OUTPUT
            else f"is {output.error:.3g} times its norm away from float32's, which rounding does not explain"
        )
        yield Problem(f"The output of {call.path!r} {what}. Keep the layer in float32.", (call.path,), (call.path,))


def _lost(evidence: Evidence) -> Iterator[Problem]:
    lost = _beyond(evidence, lambda gradient: gradient.lost, LOST)
    if not lost:
        return
    paths = tuple(path for path, _ in lost)
    gradient = lost[0][1]
    way = [
        layer.path
        for layer in evidence.layers[::-1]
        if any(part and part.lost > 0.5 for part in (layer.output_gradient, layer.input_gradient))
    ]
    yield Problem(
        f"The gradient of {_listed(paths)} underflows, with the loss scaled as in training: {percent(gradient.lost)} "
        f"of its norm becomes zero. In float32 it is at most {gradient.largest:.2g}. Keep the layer and what its "
        "gradient comes through in float32.",
        paths,
        tuple(dict.fromkeys([*paths, *way])),
    )


def _wrong(evidence: Evidence) -> Iterator[Problem]:
    least = MATTERS * math.hypot(*(layer.weight_gradient.norm for layer in evidence.layers if layer.weight_gradient))
    beyond = _beyond(evidence, lambda gradient: gradient.error, WRONG)
    wrong = [(path, gradient) for path, gradient in beyond if gradient.difference > least]
    if wrong:
        paths = tuple(path for path, _ in wrong)
        yield Problem(
            f"The gradient of {_listed(paths)} is {wrong[0][1].error:.3g} times its norm away from float32's, which "
            f"rounding (up to {WRONG:g}) does not explain. Keep the layer in float32.",
            paths,
            tuple(dict.fromkeys([*paths, *evidence.suspects])),
        )


def _drift(evidence: Evidence) -> Iterator[Problem]:
    drift = relative(evidence.candidate_loss, evidence.reference_loss)
    if drift > evidence.drift_limit:
        worst = evidence.suspects
        root = f" {worst[0]!r} adds the largest error. Keep it in float32." if worst else ""
        yield Problem(
            f"The loss is {evidence.candidate_loss:.4g}, and {evidence.reference_loss:.4g} in float32: it differs by "
            f"{percent(drift)}, above {percent(evidence.drift_limit)}.{root}",
            tuple(worst[:1]),
            tuple(worst),
        )


def drift_limit(policies: Collection[keras.DTypePolicy]) -> float:
    """How far the loss may be off: by the coarsest dtype among the policies of the layers that compute."""
    limits = [DRIFT_ROUNDINGS * _ROUNDING.get(policy.compute_dtype, 2.0**-23) for policy in policies]
    return max([*limits, *(FLOAT8_DRIFT for policy in policies if policy.quantization_mode == "float8")], default=0.0)


def _heads(evidence: Evidence) -> Iterator[Problem]:
    for path in evidence.heads:
        yield Problem(
            f"{path!r} puts out the model's result in {evidence.dtype(path)}: logits and probabilities of 16 bits "
            "saturate the loss, and no error says so. Keep layers that make outputs in float32, as apply does.",
            (path,),
            (path,),
        )
    for path in evidence.softmaxes:
        yield Problem(
            f"{path!r} computes the softmax that is the model's result in {evidence.dtype(path)}, and a cast comes too "
            "late: small probabilities are rounded or zero. Keep the softmax in float32.",
            (path,),
            (path,),
        )


def _beyond(evidence: Evidence, value: Callable[[Deviation], float], limit: float) -> list[tuple[str, Deviation]]:
    """Weight gradients above a limit, worst first."""
    found = [
        (layer.path, layer.weight_gradient)
        for layer in evidence.layers
        if layer.weight_gradient
        and value(layer.weight_gradient) > limit
        and not cancelled(layer.weight_gradient, layer.output_gradient)
    ]
    return sorted(found, key=lambda one: value(one[1]), reverse=True)


def _is_wrong(part: Deviation | None) -> bool:
    return bool(part and (part.lost > LOST_OUTPUT or part.error > WRONG))


def _overflows(part: Deviation | None) -> bool:
    return bool(part and part.overflow)


def _reaches(layer: LayerPrecision) -> float:
    return max((part.largest for part in (layer.output, layer.input) if part), default=0.0)


def _listed(paths: Iterable[str]) -> str:
    return listed([repr(path) for path in paths], _NAMED)
