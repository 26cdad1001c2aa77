"""A model under a policy against the same model in float32: measured on a few batches, tabulated and judged."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError, summarize_error
from tfopt.model.layers import LayerError, layer_paths
from tfopt.model.state import StatePreserver, draws_in_float32, optimizers_of, without_dropout
from tfopt.precision.float8_clones import quantized_clone, settle_scales
from tfopt.precision.float8_margins import measured_margins
from tfopt.precision.gate.graph import right_with_xla
from tfopt.precision.gate.layer_table import (
    AtFirst,
    Deviation,
    Grid,
    LateCast,
    LayerPrecision,
    LayerTable,
    StatePrecision,
    TensorPrecision,
    WeightGradient,
)
from tfopt.precision.gate.moments import worst_deviation
from tfopt.precision.gate.precision_report import PrecisionReport
from tfopt.precision.gate.probe import Measurement, Probe, states_ahead
from tfopt.precision.gate.training_step import Row, Variant, heads_of
from tfopt.precision.gate.verdict import Problem, cancelled, find_problems, first_overflow, vanished_gradients
from tfopt.precision.layer_policies import (
    Assignment,
    Policy,
    assign_policies,
    is_16_bit,
)
from tfopt.precision.optimizer_swap import wants_scaling
from tfopt.precision.policies import tf32
from tfopt.text import listed

_NORMALISING = tuple(
    getattr(keras.optimizers, name)
    for name in ("Adam", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Lion", "Lamb")
)


class Comparison(NamedTuple):
    """What a comparison found."""

    report: PrecisionReport
    """Without a fallback."""
    assigned: Assignment
    """What the policy means for the model."""
    policies: Mapping[str, keras.DTypePolicy]
    """The policy of every layer by path."""
    to_float32: tuple[str, ...]
    """The layers to take back to float32 first."""
    mends: bool
    """Whether taking layers back can help: not where train_step forgets to scale the loss."""


def compare(model: keras.Model, batches: Sequence[Any], policy: Policy) -> Comparison:
    """Compares a policy with float32 on some batches, leaving the model unchanged.

    Raises NotFiniteError if float32 is not finite, and tf.errors.OpError if it cannot be computed for these batches.
    """
    reference = in_float32(model)
    assigned = assign_policies(model, policy)
    in_place = nullcontext(Variant(model, assigned.paths, assigned.policies | assigned.in_16_bits_today))
    under_policy = _on_clone(model, batches, assigned) if assigned.quantized else in_place
    try:
        with without_dropout(model), draws_in_float32(), tf32(False), under_policy as candidate:
            try:
                # {} is the model as it stands, whose optimizer `apply` does not wrap before training.
                probe = Probe(reference, candidate, batches[0], applied=policy != {})
            except Exception as error:  # whatever the user's layers raise on tensors of this dtype
                raise _does_not_compute(assigned, error) from error
            with StatePreserver(model, also=probe.variables).preserved():
                measured, scale = probe.measure(batches)
                ahead = tuple(states_ahead(probe, batches[0]))
                return _judged(probe, measured, scale, assigned, ahead=ahead)
    except tf.errors.ResourceExhaustedError:
        raise
    except tf.errors.OpError as error:
        alone = Probe(reference, reference, batches[0], applied=False)
        with StatePreserver(model, also=alone.variables).preserved():
            for batch in batches:
                alone(batch, [])  # if this raises too, the policy is not at fault
        raise _does_not_compute(assigned, error) from error


def measure(probe: Probe, batches: Sequence[Any], assigned: Assignment, *, at_first: AtFirst | None) -> Comparison:
    """Runs a probe on some batches and judges what it measured; the caller restores the model.

    `at_first` is what the first comparison of a training found, if this is a later one.
    """
    measured, scale = probe.measure(batches)
    return _judged(probe, measured, scale, assigned, at_first=at_first)


def in_float32(model: keras.Model) -> Variant:
    """A model in float32, the reference; raises an UnsupportedError if its weights or layers cannot compute in it."""
    try:
        assigned = assign_policies(model, "float32")
    except UnsupportedError as error:
        raise UnsupportedError(
            f"Expected a model that can compute in float32, the reference. Found {model.name!r} with quantized layers "
            "or with weights that are not float32. Check a model made under float32 or a mixed policy, with the same "
            "weights; check float8 before it is applied."
        ) from error
    return Variant(model, assigned.paths, assigned.policies)


def recurrent_layers(paths: Mapping[keras.Layer, str]) -> dict[str, str]:
    """The path of the recurrent layer around each cell: both need one dtype, since cuDNN's GRU fails with two."""
    recurrent = [layer for layer in paths if isinstance(layer, keras.layers.RNN)]
    return {paths[cell]: paths[layer] for layer in recurrent for cell in layer._flatten_layers(include_self=False)}


@contextmanager
def _on_clone(model: keras.Model, batches: Sequence[Any], assigned: Assignment) -> Iterator[Variant]:
    """A clone with its float8 layers quantized, which could not be taken back in the model itself."""
    with StatePreserver(model).preserved():  # training a clone may advance the seed that all models share
        clone = quantized_clone(model, assigned.policies, assigned.quantized)
        with without_dropout(clone):
            try:
                settle_scales(clone, batches, len(assigned.quantized))
            except tf.errors.OpError:
                raise
            except Exception as error:  # as for the probe
                raise _does_not_compute(assigned, error) from error
            yield Variant(clone, layer_paths(clone), {})


def _does_not_compute(assigned: Assignment, error: Exception) -> UnsupportedError:
    cause = summarize_error(error)
    if isinstance(error, LayerError):
        cause = f"{assigned.paths.get(error.layer, error.layer.name)!r}: {summarize_error(error.__cause__ or error)}"
    return UnsupportedError(
        f"Expected a model that computes under {assigned.description}. Found: {cause}. Exclude the "
        'layers concerned with a policy per layer, such as {"encoder/.*": "mixed_bfloat16"}.'
    )


def _judged(
    probe: Probe,
    measured: Sequence[Measurement],
    scale: float,
    assigned: Assignment,
    *,
    ahead: tuple[StatePrecision, ...] = (),
    at_first: AtFirst | None = None,
) -> Comparison:
    """Tabulates and judges what a probe measured."""
    table = _table(probe, measured, scale, ahead, at_first)
    problems, about_sums = _with_sums(probe, table, find_problems(table))
    first = first_overflow(table)
    blamed = {path for problem in problems for path in problem.blamed}
    around = recurrent_layers(probe.candidate.paths)
    report = PrecisionReport(
        policy=assigned.description,
        problems=tuple(_sentence(problem, around) for problem in problems),
        notes=(*_notes(probe, table.layers), *about_sums),
        layers=tuple(replace(layer, blamed=layer.path in blamed) for layer in table.layers),
        first_overflow=first.path if first else None,
        fallback=None if problems else {},
        reference_loss=table.reference_loss,
        candidate_loss=table.candidate_loss,
        loss_scale=scale,
        batches=len(measured),
        float8=table.float8,
    )
    to_float32 = dict.fromkeys(path for problem in problems for path in problem.to_float32)
    mends = all(one.mends for one in problems)
    return Comparison(report, assigned, probe.policies, tuple(to_float32), mends)


def _table(
    probe: Probe,
    measured: Sequence[Measurement],
    scale: float,
    ahead: tuple[StatePrecision, ...],
    at_first: AtFirst | None,
) -> LayerTable:
    layers = _rows(probe, [row._replace(call=0) for row in probe.rows], measured)
    heads = _16_bit_heads(probe) if probe.has_16_bit_output else ()
    tensors = [worst_deviation([one.moments[[place]] for one in measured]) for place in range(len(probe.rows))]
    return LayerTable(
        calls=_rows(probe, probe.rows, measured),
        layers=layers,
        policies=probe.policies,
        computing=probe.computing,
        heads=heads,
        always_16_bits=tuple(dict.fromkeys(probe.always_16_bits)),
        late_casts=tuple(_late_casts(probe, heads)),
        tensors=tuple(_tensors(probe, tensors)),
        states=(*_states(probe, tensors), *ahead),
        gradients=tuple(_weight_gradients(probe, layers, tensors, measured)),
        scaled=_rows(probe, probe.scaled_rows, measured, "scaled"),
        half_weights=tuple(_half_weights(probe)),
        normalises=_normalises(probe.reference.model),
        grids=tuple(_grids(probe, measured, tensors)),
        constants=probe.constants,
        reference_loss=float(np.mean([one.reference_loss for one in measured])),
        candidate_loss=float(np.mean([one.candidate_loss for one in measured])),
        loss_scale=scale,
        unscaled=tuple(probe.unscaled),
        at_first=at_first,
        float8=measured_margins(probe.candidate.paths, probe.quantized, [one.quantized for one in measured]),
    )


def _with_sums(probe: Probe, table: LayerTable, problems: list[Problem]) -> tuple[list[Problem], list[str]]:
    """Returns the problems without those that XLA mends in a compiled model, and notes on gradients lost in sums."""
    lost = [] if table.normalises and problems else vanished_gradients(replace(table, normalises=False))
    names = {one.name for one in lost}
    sums = {name: [op for row, op in probe.sums if row.name == name] for name in names}
    mended = {name for name, ops in sums.items() if ops and all(map(right_with_xla, ops))}
    if mended and probe.reference.model.jit_compile:
        left = tuple(one for one in table.gradients if one.name not in mended)
        note = "XLA compiles the model and sums gradients correctly; without it some of them would be lost."
        return find_problems(replace(table, gradients=left)), [note]
    notes = []
    if table.normalises and lost:
        notes.append(
            f"Summing in 16 bits loses a part of the gradient of {listed(sorted(names), 3)}. The optimizer divides by "
            "a gradient's own size, which hides that while its terms have one sign; where they nearly cancel, the sum "
            "can be wrong."
        )
    if mended and mended == names:
        notes.append("XLA sums these gradients correctly on this device: tfopt.xla.set_jit(model, True).")
    return problems, notes


def _sentence(problem: Problem, around: Mapping[str, str]) -> str:
    """The sentence of a problem; of one that blames a cell, with the recurrent layer around it."""
    layers = dict.fromkeys(repr(around[path]) for path in problem.blamed if path in around)
    if not layers:
        return problem.sentence
    return f"{problem.sentence} Put all of {listed([*layers], 4)} into it: a cell needs its layer's dtype."


def _rows(
    probe: Probe, rows: Sequence[Row], measured: Sequence[Measurement], which: str = "moments"
) -> tuple[LayerPrecision, ...]:
    """A row of the table per path and call, with a deviation per role."""
    kinds = {path: type(layer).__name__ for layer, path in probe.candidate.paths.items()}
    places: dict[tuple[str, int], dict[str, list[int]]] = {}
    for place, row in enumerate(rows):
        roles = places.setdefault((row.path, row.call), {})
        if row.role not in ("state", "change"):
            roles.setdefault(row.role, []).append(place)
    found = []
    for (path, _), roles in places.items():
        parts: Any = {
            role: worst_deviation([getattr(one, which)[at] for one in measured]) for role, at in roles.items()
        }
        found.append(LayerPrecision(path=path, kind=kinds[path], policy=probe.policies[path].name, **parts))
    return tuple(found)


def _tensors(probe: Probe, found: Sequence[Deviation]) -> Iterator[TensorPrecision]:
    """The tensors of the candidate's calls, with the errors of those they are computed from."""
    paths = probe.candidate.paths
    # The first step of a sequence may be small beside the others: an RNN is judged by its output.
    # The error of a cast counts for the layer that casts its input: if it matters, it shows in the output.
    casts = {id(one.tensor): one.sources for one in probe.origins if one.is_cast}
    for one in probe.origins:
        if one.is_cast or one.is_first_step:
            continue
        sources = [before for source in one.sources for before in casts.get(id(source), [source])]
        taken, between = paths[one.layer], one.is_input or bool(one.layer._layers)
        around = (taken.rpartition("/")[0] or paths[probe.candidate.model]) if one.is_input else taken
        neighbours = dict.fromkeys([*(paths[layer] for layer in one.makers), taken])
        yield TensorPrecision(
            path=around,
            error=found[probe.places[id(one.tensor)]],
            sources=tuple(found[probe.places[id(source)]] for source in sources if id(source) in probe.places),
            neighbours=tuple(path for path in neighbours if path != around) if between else (),
        )


def _weight_gradients(
    probe: Probe, layers: Sequence[LayerPrecision], found: Sequence[Deviation], measured: Sequence[Measurement]
) -> Iterator[WeightGradient]:
    """The gradient of each variable."""
    arriving = {layer.path: layer.output_gradient for layer in layers}
    for row, gradient in zip(probe.rows, found, strict=True):
        if row.role == "weight_gradient":
            at = [place for place, (one, _) in enumerate(probe.sums) if one == row]
            summed = worst_deviation([one.sums[at] for one in measured]) if at else None
            path, name = row.path, row.name
            yield WeightGradient(path=path, name=name, gradient=gradient, arriving=arriving[path], summed=summed)


def _normalises(model: keras.Model) -> bool:
    """Whether all optimizers divide a gradient by its own size, as Adam does."""
    found = [getattr(one, "inner_optimizer", one) for one in optimizers_of(model)]
    return bool(found) and all(isinstance(one, _NORMALISING) for one in found)


def _half_weights(probe: Probe) -> Iterator[str]:
    """The trainable variables of 16 bits, by the paths of their layers."""
    trainable = {id(variable) for variable in probe.candidate.model.trainable_variables}
    for layer, path in probe.candidate.paths.items():
        for variable in layer._trainable_variables:
            if id(variable) in trainable and variable.dtype in ("float16", "bfloat16"):
                yield f"{path}/{variable.name}"


def _states(probe: Probe, found: Sequence[Deviation]) -> Iterator[StatePrecision]:
    """The variables that the forward pass assigns."""
    rows = probe.rows
    for place, row in enumerate(rows):
        if row.role == "change":
            given = [found[at].error for at, one in enumerate(rows) if (one.path, one.role) == (row.path, "input")]
            before = rows.index(row._replace(role="state"))
            yield StatePrecision(
                path=row.path,
                name=row.name,
                change=found[place],
                value=found[before],
                inherited=max(given, default=0.0),
            )


def _grids(probe: Probe, measured: Sequence[Measurement], found: Sequence[Deviation]) -> Iterator[Grid]:
    """What the candidate leaves of the batch's values, where that is worse than in the tensors before."""
    paths = probe.candidate.paths
    worst = {place: max((one.grids[at] for one in measured), key=list) for at, place in enumerate(probe.grids)}
    inputs = [layer for layer in paths if isinstance(layer, keras.layers.InputLayer)]
    halves = [layer for layer in inputs if layer.dtype in ("float16", "bfloat16")]
    rounding = [paths[layer] for layer in halves if is_16_bit(probe.policies[paths[layer]])]
    ids = {id(source): one for one in probe.origins if one.makes_integers for source in one.sources}
    for one in probe.origins:
        place = probe.places[id(one.tensor)]
        if place in worst:
            hidden, feature, largest, spread, changed = map(float, worst[place])
            before = [worst[probe.places[id(x)]][0] for x in one.sources if probe.places.get(id(x)) in worst]
            taker = ids.get(id(one.tensor))
            given = [found[probe.places[id(x)]].error for x in one.sources if id(x) in probe.places]
            # Rather than takes what is wrong already, or the first step of it, whose spread is smaller.
            rounds = found[place].error > 2 * max(given, default=0.0) and not one.is_first_step
            path = paths[taker.layer if taker else one.layer]
            yield Grid(
                path=path,
                blamed=tuple(at for at in rounding if path.startswith(at[: at.rfind("/") + 1])) or (path,),
                dtype=one.tensor.dtype.name,
                is_input=one.is_input,
                hidden=hidden if one.is_data and hidden > 2 * max(before, default=0.0) and rounds else 0.0,
                feature=int(feature),
                largest=largest,
                spread=spread,
                changed_ids=changed if taker else 0.0,
            )


def _late_casts(probe: Probe, heads: Collection[str]) -> Iterator[LateCast]:
    """The probabilities in 16 bits that are cast before they leave the model."""
    paths = probe.candidate.paths
    for one in probe.late_casts:
        path = paths[one.layer or probe.candidate.model]
        if path not in heads:
            before = tuple(dict.fromkeys(paths[layer] for layer in one.before))
            yield LateCast(path=path, kind=one.kind, dtype=one.dtype, before=before)


def _16_bit_heads(probe: Probe) -> tuple[str, ...]:
    """The layers that make the model's outputs in 16 bits, or the model itself if they cannot be found."""
    model, paths, _ = probe.candidate
    making = heads_of(model)
    found = [path for layer, path in paths.items() if layer in making and is_16_bit(probe.policies[path])]
    outermost = [path for path in found if path.rpartition("/")[0] not in found]
    return tuple(outermost) or (paths[model],)


def _notes(probe: Probe, layers: Sequence[LayerPrecision]) -> Iterator[str]:
    if probe.not_run:
        yield (
            f"The model has a custom train_step, which was not run ({probe.not_run}): its call, compute_loss and their "
            "gradients were compared."
        )
    if probe.updates > 1:
        yield (
            f"train_step updates weights {probe.updates} times; all gradients were compared for the weights before the "
            "first update."
        )
    for optimizer in probe.plain:
        model = probe.reference.model
        if optimizer is not None and optimizer is not model.optimizer:
            where = optimizers_of(model).get(optimizer, repr(optimizer.name))
            yield f"{where} is not a LossScaleOptimizer: its gradients were taken as train_step computes them."
        else:
            instead = "apply adds one" if wants_scaling(model) else "auto_scale_loss=False keeps it so"
            yield f"The model's optimizer is not a LossScaleOptimizer: the loss was checked unscaled; {instead}."
    if probe.draws_differ:
        yield "The model draws different random numbers in each dtype, beyond dropout; part of the error is theirs."
    gradients = [(layer.weight_gradient, layer.output_gradient) for layer in layers]
    noisy = [part for part, source in gradients if part and part.error > 1 and not cancelled(part, source)]
    if noisy:
        yield (
            f"Rounding turns the gradients of {len(noisy)} layers away from float32's by more than their own norm, as "
            "in deep batch-normalised nets before training. It acts as noise; compare the accuracy after training."
        )
