"""What each layer costs in a training step: timed alone, forward and backward, in float32 and in 16 bits."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.measure import interleave
from tfopt.measure.layer_steps import BlockTimer, outputs_and_gradients
from tfopt.model.step_calls import StepCall, StepCalls, kind_of
from tfopt.precision.layer_policies import under_policies

_TURNS = 6
_DIFFERENT = 1.05
# Enough that calling a function does not count beside casting.
_CAST_ELEMENTS = 2**22

Policies = Mapping[keras.Layer, keras.DTypePolicy]


class LayerCost(NamedTuple):
    """What one layer, with everything inside it, costs in a training step."""

    layer: keras.Layer
    ms: tuple[float, float] | None
    """Milliseconds in float32 and in 16 bits, equal if they differ by less than 5 %; None if it does not run alone."""
    links: Mapping[int | None, int]
    """The elements it takes from each earlier layer, by that one's place in the list; None stands for the data."""


def measure_layers(model: keras.Model, batch: Any, float32: Policies, half: Policies) -> tuple[list[LayerCost], float]:
    """Times each layer on the inputs it has in a training step, without changing a variable.

    A layer means the outermost one that is not a model; what is inside it counts as part of it. Layers of the same
    class, config and input shapes are timed once. Layers inside a loop are left out.

    Args:
        model: A built, compiled model.
        batch: One batch.
        float32, half: The policies of its layers in float32 and in 16 bits.

    Returns:
        The layers in the order in which they compute, and the milliseconds that one element costs where the dtype
        changes between two layers: cast on the way forward, and its gradient on the way back.
    """
    recording = StepCalls(model, batch)
    by_layer = recording.by_layer()
    order = {layer: place for place, layer in enumerate(by_layer)}
    links: dict[keras.Layer, Counter[int | None]] = {layer: Counter() for layer in order}
    for source, layer, elements in recording.links:
        at = None if source is None else order[source]
        # A shared layer may take what a later one makes: then the link counts for the later one.
        if at is not None and at > order[layer]:
            links[[*order][at]][order[layer]] += elements
        elif source is not layer:
            links[layer][at] += elements
    known: dict[Any, tuple[float, float] | None] = {}
    found = []
    for layer, calls in by_layer.items():
        key = kind_of(layer, calls)
        if key not in known:
            known[key] = _timed(model, layer, calls, float32, half)
        found.append(LayerCost(layer, known[key], links[layer]))
    dtype = next((policy.compute_dtype for policy in half.values() if policy.compute_dtype != "float32"), "float32")
    return found, _cast_ms(dtype, bool(model.jit_compile))


def _is_floating(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating


def _timed(
    model: keras.Model, layer: keras.Layer, calls: list[StepCall], float32: Policies, half: Policies
) -> tuple[float, float] | None:
    steps = {}
    variants = {"float32": float32} | ({"half": half} if half.get(layer) != float32.get(layer) else {})
    for name, policies in variants.items():
        dtype = policies[layer].compute_dtype if layer in policies else layer.compute_dtype
        inputs = [[_cast(tensor, dtype) for tensor in call.tensors] for call in calls]
        function = tf.function(
            partial(outputs_and_gradients, calls), autograph=False, jit_compile=bool(model.jit_compile)
        )
        try:
            with under_policies(model, policies):
                steps[name] = partial(function.get_concrete_function(inputs), inputs)
            steps[name]()
        except tf.errors.ResourceExhaustedError:
            raise
        except Exception:  # noqa: BLE001 - whatever a layer raises that cannot be called outside its model
            return None
        finally:
            model._clear_losses()
    times = interleave({name: BlockTimer(step) for name, step in steps.items()}, _TURNS)
    # The fastest blocks: whatever else runs on the machine only adds time.
    ms = min(times["float32"].samples_ms), min(times.get("half", times["float32"]).samples_ms)
    return ms if max(ms) > _DIFFERENT * min(ms) else (sum(ms) / 2,) * 2  # what is noise must not decide


def _cast(tensor: Any, dtype: str) -> Any:
    return tf.cast(tensor, dtype) if _is_floating(tensor) else tensor


def _cast_ms(dtype: str, jit_compile: bool) -> float:
    """Milliseconds to cast one element to 16 bits and one back."""
    values = tf.ones([_CAST_ELEMENTS])
    back_and_forth = tf.function(
        lambda x: (tf.cast(x, dtype), tf.cast(tf.cast(x, dtype), "float32")), autograph=False, jit_compile=jit_compile
    ).get_concrete_function(values)
    timer = BlockTimer(partial(back_and_forth, values))
    return min(timer().samples_ms) / _CAST_ELEMENTS
