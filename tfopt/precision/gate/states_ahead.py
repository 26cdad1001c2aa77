"""What 16 bits do to a state that a layer counts up, at the value it has only after many steps."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.model.state import StatePreserver, same_draws
from tfopt.precision.gate.layer_table import StatePrecision
from tfopt.precision.gate.moments import moments, worst_deviation
from tfopt.precision.gate.own_step import has_own_step
from tfopt.precision.gate.probe import Probe
from tfopt.precision.gate.training_step import Variant, advanced

# Whole numbers of that size are 4 apart: what was added in each of as many steps is less than half of that.
STEPS = {"bfloat16": 576, "float16": 4608}
# A state that moves by the same amount there as it does now is a sum. A moving average, whose steps shrink, is not, nor
# is a counter that begins again.
_SAME = 0.1


def states_ahead(probe: Probe, batch: Any) -> Iterator[StatePrecision]:
    """The sums among the states that a forward pass assigns in 16 bits, many steps from now; the model is unchanged."""
    rows = [row for row in probe.states_in_16_bits if probe.policies[row.path].compute_dtype in STEPS]
    if not rows:
        return
    states = [_states_of(variant) for variant in (probe.reference, probe.candidate)]
    keys = [key for key in states[0] if key in states[1]]
    asked = {(row.path, row.name): probe.policies[row.path].compute_dtype for row in rows}

    def compare(batch: Any) -> dict[tuple[str, str], list[tf.Tensor]]:
        def after(which: int, values: list[tf.Tensor]) -> list[tf.Tensor]:
            variant = (probe.reference, probe.candidate)[which]
            with same_draws():
                return advanced(variant, batch, [states[which][key] for key in keys], values)

        now = [tf.convert_to_tensor(states[0][key].value) for key in keys]
        step = [new - old if key in asked else None for key, new, old in zip(keys, after(0, now), now, strict=True)]
        then = [
            old if by is None else tf.cast(tf.cast(old + STEPS[asked[key]] * by, asked[key]), old.dtype)
            for key, old, by in zip(keys, now, step, strict=True)
        ]
        both = zip(keys, then, step, after(0, then), after(1, then), strict=True)
        return {
            key: [moments(by, new - old), moments(new - old, other - old), moments(old, old)]
            for key, old, by, new, other in both
            if by is not None
        }

    function = tf.function(compare, autograph=False)
    try:
        touched = function.get_concrete_function(batch).graph.variables
    except Exception:
        if not has_own_step(probe.candidate.model):
            raise
        return  # a GAN, for one, has nothing to call; the comparison sees one step of its states
    with StatePreserver(probe.candidate.model, also=touched).preserved():
        found = function(batch)
    for (path, name), tensors in found.items():
        moved, change, value = (worst_deviation([tensor.numpy()[None]]) for tensor in tensors)
        if moved.error <= _SAME and moved.norm:
            steps = STEPS[asked[path, name]]
            yield StatePrecision(path=path, name=name, change=change, value=value, inherited=0.0, ahead=steps)


def _states_of(variant: Variant) -> dict[tuple[str, str], keras.Variable]:
    return {
        (path, variable.name): variable
        for layer, path in variant.paths.items()
        for variable in layer._non_trainable_variables
    }
