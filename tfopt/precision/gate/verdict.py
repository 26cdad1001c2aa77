"""The verdict of the precision gate: its thresholds, and what counts as a problem of a dtype policy."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import keras

from tfopt.precision.gate.layer_table import AtFirst, Deviation, LayerPrecision, LayerTable, WeightGradient
from tfopt.text import listed, percent

# Any overflow is one too many. Micikevicius et al. ("Mixed Precision Training", ICLR 2018, section 3.2) count the
# gradients that become zero and find that many of them are harmless, so the share of the norm counts here. Measured on
# weight gradients of healthy nets: up to 2 %, because ReLU units near zero flip between dtypes.
LOST = 0.1
# Outputs of ReLU lose more to such flips: 71 % if the two dtypes were unrelated, measured 20 %.
LOST_OUTPUT = 0.9
# Deep batch-normalised nets amplify rounding: at initialisation, ResNet-50's gradient in bfloat16 has float32's size
# but hardly its direction (measured: an error of 1.5; 1.41 would be unrelated), and its last layers' output is off by
# 0.7. Such nets still train to the same accuracy (Micikevicius et al., table 1; Kalamkar et al., "A Study of BFLOAT16
# for Deep Learning Training", 2019), since the error acts as noise. Anything beyond this is not rounding.
WRONG = 2.0
# A layer whose input is within CLEAN of float32 and whose output is off by OWN_ERROR is itself at fault: rounding of
# its input and weights explains a few per cent. Measured: at most 0.07 in healthy nets; 0.30 and more where positions,
# ids or years are computed in 16 bits. float8, coarser by design, only has the limit above.
CLEAN = 0.05
OWN_ERROR = 0.1
# The same for what the forward pass adds to a variable. A moving average that stands still is off by 1.
STATE_ERROR = 0.5
# A feature of the batch is hidden if rounding adds noise of a tenth of its spread: a year in bfloat16, whose numbers
# around 2000 are 8 apart, gets 0.2; standardised features 0.002.
HIDDEN = 0.1
# A wrong gradient is a layer's fault only if the one that arrives is off by less than this. MobileNetV2 in bfloat16 at
# initialisation gets to 2.2 in small steps.
ARRIVING = 0.5
# A gradient must also be off by this share of the norm of all gradients: one that is close to zero in float32, as
# behind a saturated softmax, has large relative errors that change nothing.
MATTERS = 0.01
# A gradient vanishes if it loses a quarter of its length in a sum, or between a right one that arrives and the
# variable: its error is then 1 at most. Rounding is noise, which makes a gradient longer. A broadcast bias in float16
# that lost 46 % learned clearly more slowly by SGD, a LayerScale that lost 7 % did not.
SHRUNK = 0.25
# Float32 under two loss scales, powers of two both, differs in nothing where the backward pass is linear.
LINEAR = 0.01
# While training, also by this share of the norm of all gradients in the first comparison.
MATTERS_LATER = 0.1
# Limit of the loss drift in roundings of the dtype: 3 % in float16, 25 % in bfloat16. Measured on healthy nets: up to
# 1 % and 12 % (ResNet-50 at initialisation, on noise); below 0.1 % and 1 % for nets of a few layers.
DRIFT_ROUNDINGS = 32
# float8's E4M3 has 3 bits of mantissa (NVIDIA, "Using FP8 with Transformer Engine"): 32 roundings would bound nothing.
FLOAT8_DRIFT = 0.5
# Eight roundings of float32. A value this small next to its source is what rounding leaves of a sum that is zero, such
# as the gradient of a bias before batch normalisation.
_CANCELLED = 8 * 2.0**-23
_WHOLE = {"float16": 2048, "bfloat16": 256}
_ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
_SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a policy does not pass."""

    sentence: str
    blamed: tuple[str, ...]
    """The layers at its root."""
    involved: tuple[str, ...] = ()
    """Other layers that float32 may have to reach, worst first."""
    mends: bool = True
    """Whether float32 in some layers can mend it."""

    @property
    def to_float32(self) -> tuple[str, ...]:
        """The layers to take back to float32."""
        return tuple(dict.fromkeys(self.blamed + self.involved))


def find_problems(table: LayerTable) -> list[Problem]:
    """Judges a table: problems in order of gravity, none if the policy passes."""
    # Whatever follows from an overflow or a wrong output is not a problem of its own.
    found = [*_always_16_bits(table)] or [*_overflow(table)] or [*_rounded_batch(table)] or [*_wrong_outputs(table)]
    found = found or [*_rounded_batch(table, computed=True)] or [*_float8(table)] or [*_gradient_overflow(table)]
    # So do gradients divided by a scale that nothing was multiplied by.
    gradients = [] if table.unscaled else [*_lost_gradients(table), *_wrong_gradients(table)]
    gradients = gradients or [*_vanished_gradients(table)]
    if not table.unscaled and (scaled := [*_scaled(table)]):
        gradients = scaled
    found = found or [*_wrong_states(table), *gradients, *_drift(table)]
    return [*_half_weights(table), *_unscaled(table), *found, *_heads(table)]


def vanished_gradients(table: LayerTable) -> list[WeightGradient]:
    """Gradients that are much shorter than what arrives explains, if the optimizers do not make up for that."""

    def vanishes(one: WeightGradient) -> bool:
        clean = one.arriving is None or one.arriving.error < CLEAN
        shrunk = one.summed.shrunk if one.summed else one.gradient.shrunk if clean else 0.0
        return shrunk > SHRUNK and one.gradient.difference > _least(table) and not cancelled(one.gradient, one.arriving)

    return [] if table.normalises else [one for one in table.gradients if vanishes(one)]


def first_overflow(table: LayerTable) -> LayerPrecision | None:
    """The first call whose output overflows."""
    return next((call for call in table.calls if call.output and call.output.overflow), None)


def relative(value: float, reference: float) -> float:
    """The distance of a value from a reference, relative to the reference; infinite if either is not finite."""
    difference = abs(value - reference)
    if not math.isfinite(difference):
        return math.inf
    return difference / abs(reference) if reference else (math.inf if difference else 0.0)


def loss_drift(value: float, reference: float, at_first: AtFirst | None) -> float:
    """The distance of a loss from float32's, relative to it or, if that is larger, to the loss at first."""
    drift = relative(value, reference)
    smaller = at_first is not None and abs(reference) < at_first.loss and math.isfinite(drift)
    return abs(value - reference) / at_first.loss if at_first and smaller else drift


def drift_limit(policies: Collection[keras.DTypePolicy]) -> float:
    """How far the loss may drift, given the policies of the layers that compute: the coarsest dtype decides."""
    limits = [DRIFT_ROUNDINGS * _ROUNDING.get(policy.compute_dtype, 2.0**-23) for policy in policies]
    return max([*limits, *(FLOAT8_DRIFT for policy in policies if policy.quantization_mode == "float8")], default=0.0)


def cancelled(part: Deviation, source: Deviation | None) -> bool:
    """Whether a tensor is zero up to float32 rounding, compared with the tensor it is computed from."""
    return source is not None and part.norm <= _CANCELLED * source.norm


def _unscaled(table: LayerTable) -> Iterator[Problem]:
    for name in table.unscaled:
        yield Problem(
            f"The optimizer {name!r} would divide gradients by the loss scale, but train_step takes them of a loss "
            "that was not scaled: the weights would hardly move. Inside the tf.GradientTape, write "
            "`loss = optimizer.scale_loss(loss)`, and take the gradients of that.",
            (),
            mends=False,
        )


def _overflow(table: LayerTable) -> Iterator[Problem]:
    root = first_overflow(table)
    reaches = {layer.path: _reaches(layer) for layer in table.layers}
    beyond = [path for path, value in reaches.items() if value > _LARGEST.get(_dtype(table, path), math.inf)]
    if root is not None and root.output:
        first, dtype = root.path, _dtype(table, root.path)
        others = [path for path in beyond if path != first]
        too = f" {_listed(others)} would overflow too." if others else ""
        constant = _constant(table, first)
        # Values beyond its constants overflow whatever these are.
        if constant and _reaches(root) <= 1.01 * max(map(abs, [*table.constants[first], _LARGEST.get(dtype, 0.0)])):
            share = percent(root.output.overflow)
            what = f"is NaN or infinite in {dtype}, the first layer to be so: {share} of its output."
            remedy = f"{constant}{too} Or keep it in float32."
        else:
            what = (
                f"overflows{'' if first in beyond else ' inside'}, the first layer to do so: "
                f"{percent(root.output.overflow)} of its output in {dtype}, whose largest value is "
                f"{_LARGEST.get(dtype, math.inf):.5g}; float32 reaches {_reaches(root):.3g}."
            )
            remedy = f"{too} Keep it in float32, or scale its values down."
        yield Problem(f"{first!r} {what}{remedy}", (first, *others))
    elif not math.isfinite(table.candidate_loss):
        yield Problem(
            f"The loss is {table.candidate_loss} ({table.reference_loss:.4g} in float32), though no layer's output "
            "overflows. Compute everything between the layers and the loss in float32.",
            (),
            tuple(beyond or _suspects(table)),
        )


def _float8(table: LayerTable) -> Iterator[Problem]:
    for margin in table.float8:
        for sentence in margin.faults(_dtype(table, margin.path)):
            yield Problem(sentence, (margin.path,))


def _gradient_overflow(table: LayerTable) -> Iterator[Problem]:
    reached = [layer.path for layer in table.layers[::-1] if _overflows(layer.weight_gradient)]
    if not reached:
        return
    # It begins where the incoming gradient is finite and the outgoing one is not.
    began = [
        call.path
        for call in table.calls[::-1]
        if not _overflows(call.output_gradient) and (_overflows(call.input_gradient) or call.path in reached)
    ]
    origins = began or reached
    yield Problem(
        f"Gradients overflow even without loss scaling, in the backward pass first at {origins[0]!r}. "
        "Keep it in float32, or make the loss smaller.",
        (origins[0],),
        tuple(origins),
    )


def _always_16_bits(table: LayerTable) -> Iterator[Problem]:
    """A dtype that is written into a model when it is made, as by `ops.cast(x, other.dtype)` between layers."""
    if paths := table.always_16_bits:
        yield Problem(
            f"Operations between layers, at {_listed(paths)}, compute in 16 bits whatever the policy: they took their "
            "dtype when the model was made under a 16-bit policy, and there is no float32 to compare with. Make the "
            "model under float32 and apply the policy, or put the operations into a layer.",
            paths,
        )


def _rounded_batch(table: LayerTable, *, computed: bool = False) -> Iterator[Problem]:
    """Ids and features of the batch that 16 bits cannot tell apart, as layers take them or as they compute them."""
    found: dict[tuple[str, ...], Problem] = {}
    for grid in table.grids:
        if grid.changed_ids:
            found.setdefault(
                grid.blamed,
                Problem(
                    f"{grid.path!r} gets ids rounded to {grid.dtype}: {percent(grid.changed_ids)} of them turn into "
                    f"other ids, since {grid.dtype} is exact for whole numbers up to {_WHOLE[grid.dtype]} only. Pass "
                    f"ids as integers, through keras.Input(dtype='int32'), or keep {_listed(grid.blamed)} in float32.",
                    grid.blamed,
                ),
            )
        elif grid.hidden > HIDDEN and grid.is_input != computed:
            found.setdefault(
                grid.blamed,
                Problem(
                    f"{grid.path!r} rounds the batch to {grid.dtype}, which hides feature {grid.feature}: it reaches "
                    f"{grid.largest:.5g} and varies by {grid.spread:.3g}, of which rounding changes "
                    f"{percent(grid.hidden)}. Subtract the feature's mean in the pipeline, or keep "
                    f"{_listed(grid.blamed)} in float32.",
                    grid.blamed,
                ),
            )
    yield from found.values()


def _wrong_outputs(table: LayerTable) -> Iterator[Problem]:
    named = set()
    for tensor in table.tensors:
        output, path = tensor.error, tensor.path
        # A tensor whose sources are wrong already is not the origin.
        if path in named or any(_is_wrong(source) or cancelled(output, source) for source in tensor.sources):
            continue
        float8 = table.policies[path].quantization_mode == "float8"
        own = tensor.own_error if tensor.inherited < CLEAN and not float8 else 0.0
        if not _is_wrong(output) and own <= OWN_ERROR:
            continue
        named.add(path)
        what = (
            f"loses {percent(output.lost)} of its norm to zeros; in float32 it is at most {output.largest:.2g}"
            if output.lost > LOST_OUTPUT
            else f"differs from float32 by {output.error:.3g} times its norm, more than rounding explains"
            if _is_wrong(output)
            else f"differs from float32 by {percent(own)} of its norm, though its input differs by at most "
            f"{percent(tensor.inherited)}"
        )
        where = f"What {path!r} computes between its layers" if tensor.neighbours else f"The output of {path!r}"
        yield Problem(f"{where} {what}.{_constant(table, path)} Keep the layer in float32.", (path,), tensor.neighbours)


def _wrong_states(table: LayerTable) -> Iterator[Problem]:
    # Near its goal, a state may lose one step to rounding. In a training, repeated.py follows it for several.
    for state in () if table.at_first else table.states:
        change, dtype = state.change, _dtype(table, state.path)
        if not state.value.norm or state.inherited >= CLEAN or cancelled(change, state.value):
            continue
        # What rounding leaves of it, rather than of what it is updated with.
        rounded = change.difference > _ROUNDING.get(dtype, 0.0) / 32 * state.value.norm
        if not (change.lost > LOST_OUTPUT or (change.error > STATE_ERROR and rounded)):
            continue
        if state.ahead:
            yield Problem(
                f"{state.path!r} adds to its variable {state.name!r} in {dtype}: once it is {state.ahead} times what "
                f"a step adds, {percent(change.error)} of that is lost to rounding, so it stops. Make it with "
                "autocast=False, or as an integer, or keep the layer in float32.",
                (state.path,),
            )
        else:
            yield Problem(
                f"{state.path!r} updates its variable {state.name!r} in {dtype}: what this step adds differs from "
                f"float32 by {percent(change.error)}, so in training it drifts or stops. Compute the update in "
                "float32, or keep the layer in float32.",
                (state.path,),
            )


def _constant(table: LayerTable, path: str) -> str:
    """A sentence on the constant of a layer that its dtype cannot hold, if there is one."""
    dtype = _dtype(table, path)
    largest, smallest = _LARGEST.get(dtype, math.inf), _SMALLEST.get(dtype, 0.0)
    sizes = {abs(value): value for value in table.constants.get(path, ())}
    beyond, below = max(sizes, default=0.0), min(sizes, default=math.inf)
    if beyond > largest:
        return f" Its constant {sizes[beyond]:g} is beyond {largest:.5g}, {dtype}'s largest value: use a smaller one."
    if below < smallest:
        return f" Its constant {sizes[below]:g} becomes zero in {dtype}: use a larger one."
    return ""


def _lost_gradients(table: LayerTable) -> Iterator[Problem]:
    lost = _gradients_above(table, lambda gradient: gradient.lost, LOST)
    # What becomes zero is off by 1 at most. Beyond that rounding moves the gradient as a whole: noise, as above.
    lost = {path: one for path, one in lost.items() if _dtype(table, path) == "float16" or one.error <= 1.0}
    if not lost:
        return
    worst = next(iter(lost.values()))
    passed = [
        layer.path
        for layer in table.layers[::-1]
        if any(part and part.lost > 0.5 for part in (layer.output_gradient, layer.input_gradient))
    ]
    where, how = f"The gradient of {_listed(lost)}", f"{percent(worst.lost)} of its norm becomes zero"
    keep = "keep the layer in float32, and the layers its gradient passes through."
    if all(_dtype(table, path) != "float16" for path in lost):
        text = f"{where} is lost to rounding, not to the range of the dtype: {how}. {keep.capitalize()}"
    elif table.loss_scale > 1:
        text = f"{where} underflows even with loss scaling: {how}; in float32 it is at most {worst.largest:.2g}. "
        text += keep.capitalize()
    else:
        text = f"{where} underflows without loss scaling: {how}; in float32 it is at most {worst.largest:.2g}. "
        text += f"Scale the loss with a LossScaleOptimizer, or {keep}"
    yield Problem(text, tuple(lost), tuple(passed))


def _wrong_gradients(table: LayerTable) -> Iterator[Problem]:
    least = _least(table)
    above = _gradients_above(table, lambda gradient: gradient.error, WRONG)
    wrong = {path: gradient for path, gradient in above.items() if gradient.difference > least}
    # It begins where what comes in is still right: deep batch-normalised nets amplify rounding little by little.
    arriving = {layer.path: layer.output_gradient for layer in table.layers}
    begin = any(
        _begins(call.output_gradient, call.input_gradient) for call in table.calls if call.output_gradient
    ) or any(_begins(arriving[path], gradient) for path, gradient in wrong.items())
    if wrong and begin:
        yield Problem(
            f"The gradient of {_listed(wrong)} differs from float32 by {next(iter(wrong.values())).error:.3g} times "
            f"its norm, more than rounding explains (up to {WRONG:g}). Keep the layer in float32.",
            tuple(wrong),
            tuple(_suspects(table)),
        )


def _least(table: LayerTable) -> float:
    """The norm above which the error of a gradient matters."""
    least = MATTERS * math.hypot(*(layer.weight_gradient.norm for layer in table.layers if layer.weight_gradient))
    return max(least, MATTERS_LATER * table.at_first.gradient) if table.at_first else least


def _vanished_gradients(table: LayerTable) -> Iterator[Problem]:
    vanished = vanished_gradients(table)
    if vanished:
        paths = tuple(dict.fromkeys(one.path for one in vanished))
        kinds = dict.fromkeys(_dtype(table, path) for path in paths)
        worst = max((one.summed or one.gradient).shrunk for one in vanished)
        dtypes = " and ".join(kinds)
        summed = f"summed in {dtypes}, where a large sum swallows what is added"
        how = summed if all(one.summed for one in vanished) else f"computed in {dtypes}"
        yield Problem(
            f"The gradient of {_listed(one.name for one in vanished)} loses {percent(worst)} of its length, "
            f"though what arrives does not: it is {how}. Keep {_listed(paths)} in float32.",
            paths,
        )


def _scaled(table: LayerTable) -> Iterator[Problem]:
    """Gradients that depend on the loss scale in float32, as behind a clip, since the backward pass is not linear."""
    changed = {
        call.path: gradient
        for call in table.scaled
        if (gradient := call.weight_gradient) and gradient.error > LINEAR and gradient.difference > _least(table)
    }
    if not changed:
        return
    # It begins where what arrives is the same under both scales.
    begin = [
        call.path
        for call in table.scaled[::-1]
        if not _depends(call.output_gradient) and (_depends(call.input_gradient) or _depends(call.weight_gradient))
    ]
    inside = begin and any(_depends(call.input_gradient) for call in table.scaled)
    where = f"{begin[0]!r} clips, normalises or rounds" if inside else "train_step clips or normalises"
    worst = max(gradient.error for gradient in changed.values())
    yield Problem(
        f"{where} gradients that are multiplied by the loss scale of {table.loss_scale:g}: in float32, too, that "
        f"changes the gradient of {_listed(changed)}, by up to {percent(worst)} of its norm. Clip with the optimizer's "
        "clipnorm or clipvalue, which sees unscaled gradients, or use bfloat16, which needs no loss scale.",
        tuple(begin[:1]) if inside else (),
        mends=False,
    )


def _depends(part: Deviation | None) -> bool:
    return bool(part and part.error > LINEAR)


def _half_weights(table: LayerTable) -> Iterator[Problem]:
    if table.half_weights:
        owners = dict.fromkeys(name.rpartition("/")[0] for name in table.half_weights)
        yield Problem(
            f"{_listed(table.half_weights)} trains in 16 bits, as the model was made, beside weights of float32: an "
            "update below half of its last digit is lost, in bfloat16 0.2 % of the weight. Leave `dtype` out of "
            "`add_weight`: layers compute in 16 bits all the same.",
            tuple(owners),
            mends=False,
        )


def _drift(table: LayerTable) -> Iterator[Problem]:
    drift = loss_drift(table.candidate_loss, table.reference_loss, table.at_first)
    limit = drift_limit(table.computing)
    if drift > limit:
        worst = _suspects(table)
        root = f" {worst[0]!r} adds the largest error; keep it in float32." if worst else ""
        yield Problem(
            f"The loss is {table.candidate_loss:.4g} ({table.reference_loss:.4g} in float32): it differs by "
            f"{percent(drift)}, above the limit of {percent(limit)}.{root}",
            tuple(worst[:1]),
            tuple(worst),
        )


def _heads(table: LayerTable) -> Iterator[Problem]:
    for path in table.heads:
        yield Problem(
            f"{path!r} outputs the model's result in {_dtype(table, path)}: 16-bit logits and probabilities silently "
            "saturate the loss. Keep output layers in float32, as apply does.",
            (path,),
        )
    for late in table.late_casts:
        yield Problem(
            f"{late.path!r} computes the model's {late.kind} in {late.dtype}, and casting its result is too late: "
            "small probabilities are already rounded or zero. Keep the "
            f"{late.kind}{f' and {_listed(late.before)}' if late.before else ''} in float32.",
            (late.path,),
            late.before,
        )


def _suspects(table: LayerTable) -> list[str]:
    """The layers with the largest own errors among those not in float32, worst first.

    An eighth of them, so that a few rounds of taking suspects back to float32 get somewhere.
    """
    policies = table.policies
    changed = [x for x in table.layers if _dtype(table, x.path) != "float32" or policies[x.path].quantization_mode]
    ranked = sorted(changed, key=lambda layer: layer.own_error, reverse=True)
    return [layer.path for layer in ranked[: -(-len(ranked) // 8)]]


def _dtype(table: LayerTable, path: str) -> str:
    """The dtype a layer computes in."""
    return str(table.policies[path].compute_dtype)


def _gradients_above(table: LayerTable, value: Callable[[Deviation], float], limit: float) -> dict[str, Deviation]:
    """Weight gradients above a limit by path, worst first."""
    found = {
        layer.path: gradient
        for layer in table.layers
        if (gradient := layer.weight_gradient)
        and value(gradient) > limit
        and not cancelled(gradient, layer.output_gradient)
    }
    return dict(sorted(found.items(), key=lambda item: value(item[1]), reverse=True))


def _begins(arriving: Deviation | None, gradient: Deviation | None) -> bool:
    """Whether a gradient is wrong though the one it is computed from is not."""
    right = arriving is None or arriving.error < ARRIVING
    return right and gradient is not None and gradient.error > WRONG and not cancelled(gradient, arriving)


def _is_wrong(part: Deviation | None) -> bool:
    return bool(part and (part.lost > LOST_OUTPUT or part.error > WRONG))


def _overflows(part: Deviation | None) -> bool:
    return bool(part and part.overflow)


def _reaches(layer: LayerPrecision) -> float:
    """The largest magnitude that goes in or comes out in float32."""
    return max((part.largest for part in (layer.output, layer.input) if part), default=0.0)


def _listed(paths: Iterable[str]) -> str:
    return listed([repr(path) for path in paths], _NAMED)
