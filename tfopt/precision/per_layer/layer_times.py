"""What each layer costs in a training step: timed alone, forward and backward, in float32 and in 16 bits."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.measure import StepTimes, interleave
from tfopt.measure.timers import wait
from tfopt.model.layers import calls_wrapped, floating_tensors
from tfopt.precision.gate.training_step import forward
from tfopt.precision.layer_policies import under_policies

_TURNS = 6
_BLOCK_SECONDS = 0.005
_BLOCKS = 3
_MOST_STEPS = 200
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


class _Call(NamedTuple):
    """One call of a layer in the recorded step."""

    arguments: Any
    """Positional and keyword arguments, with None in place of tensors."""
    places: list[int]
    """Where the tensors are among the flattened arguments."""
    tensors: list[Any]
    has_gradient: list[bool]
    """Which of them training takes a gradient of."""


class _Recording:
    """The calls of a model's layers in one step, with the inputs that they have there."""

    def __init__(self, model: keras.Model, batch: Any):
        self.calls: dict[keras.Layer, list[_Call]] = {}
        """In the order in which they compute."""
        self.links: list[tuple[keras.Layer | None, keras.Layer, int]] = []
        self._made: dict[int, keras.Layer] = {}
        self._kept: list[Any] = []  # keeps tensors alive, so that ids stay unique
        self._trains: dict[keras.Layer | None, bool] = {None: False}
        self._graph: Any = None

        def run(batch: Any) -> Any:
            self._graph = tf.compat.v1.get_default_graph()
            with keras.StatelessScope(), calls_wrapped(dict.fromkeys(_outermost(model)), self._recorded):
                forward(model, batch)
            return [call.tensors for calls in self.calls.values() for call in calls]

        try:
            values = iter(tf.function(run, autograph=False).get_concrete_function(batch)(batch))
        finally:
            model._clear_losses()  # they would keep tensors of that graph
        self.calls = {
            layer: [call._replace(tensors=next(values)) for call in calls] for layer, calls in self.calls.items()
        }

    def _recorded(self, layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if tf.compat.v1.get_default_graph() is not self._graph:  # a loop's, whose tensors cannot be read outside
                return method(*args, **kwargs)
            self._add(layer, (args, kwargs))
            result = method(*args, **kwargs)
            tensors = floating_tensors(result)
            self._kept += tensors
            self._made |= {id(tensor): layer for tensor in tensors}
            return result

        return call

    def _add(self, layer: keras.Layer, arguments: Any) -> None:
        leaves = keras.tree.flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        tensors = [leaves[place] for place in places]
        sources = [self._sources(tensor) if _is_floating(tensor) else set() for tensor in tensors]
        gradients = [any(self._trains[source] for source in those) for those in sources]
        self._trains[layer] = self._trains.get(layer, False) or bool(layer.trainable_weights) or any(gradients)
        empty = keras.tree.map_structure(lambda leaf: None if tf.is_tensor(leaf) else leaf, arguments)
        self.calls.setdefault(layer, []).append(_Call(empty, places, tensors, gradients))
        for tensor, those in zip(tensors, sources, strict=True):
            self.links += [(source, layer, tensor.shape.num_elements() or 0) for source in those]

    def _sources(self, tensor: tf.Tensor) -> set[keras.Layer | None]:
        """The layers whose outputs a tensor was computed from by operations alone; None for the data and constants."""
        found: set[keras.Layer | None] = set()
        waiting, seen = [tensor], {id(tensor)}
        while waiting:
            one = waiting.pop()
            if id(one) in self._made:
                found.add(self._made[id(one)])
                continue
            if one.op.type == "Placeholder":
                found.add(None)
            before = [x for x in one.op.inputs if id(x) not in seen and x.dtype != tf.resource]
            self._kept += before
            seen.update(map(id, before))
            waiting += before
        return found or {None}


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
    recording = _Recording(model, batch)
    order = {layer: place for place, layer in enumerate(recording.calls)}
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
    for layer, calls in recording.calls.items():
        key = _kind(layer, calls)
        if key not in known:
            known[key] = _timed(model, layer, calls, float32, half)
        found.append(LayerCost(layer, known[key], links[layer]))
    dtype = next((policy.compute_dtype for policy in half.values() if policy.compute_dtype != "float32"), "float32")
    return found, _cast_ms(dtype, bool(model.jit_compile))


def _outermost(model: keras.Model) -> Iterator[keras.Layer]:
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _outermost(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer


def _is_floating(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating


def _kind(layer: keras.Layer, calls: list[_Call]) -> Any:
    """Equal for layers that take the same time."""
    try:
        config = {name: value for name, value in layer.get_config().items() if name != "name"}
    except Exception:  # noqa: BLE001 - a user's class without a config
        return layer
    weights = [(weight.shape, weight.trainable) for weight in layer.weights]
    inputs = [[(tensor.shape, tensor.dtype) for tensor in call.tensors] for call in calls]
    return str((type(layer), config, weights, inputs, [(call.arguments, call.has_gradient) for call in calls]))


def _timed(
    model: keras.Model, layer: keras.Layer, calls: list[_Call], float32: Policies, half: Policies
) -> tuple[float, float] | None:
    steps = {}
    variants = {"float32": float32} | ({"half": half} if half.get(layer) != float32.get(layer) else {})
    for name, policies in variants.items():
        dtype = policies[layer].compute_dtype if layer in policies else layer.compute_dtype
        inputs = [[_cast(tensor, dtype) for tensor in call.tensors] for call in calls]
        function = tf.function(partial(_step, layer, calls), autograph=False, jit_compile=bool(model.jit_compile))
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
    times = interleave({name: _Timer(step) for name, step in steps.items()}, _TURNS)
    # The fastest blocks: whatever else runs on the machine only adds time.
    ms = min(times["float32"].samples_ms), min(times.get("half", times["float32"]).samples_ms)
    return ms if max(ms) > _DIFFERENT * min(ms) else (sum(ms) / 2,) * 2  # what is noise must not decide


def _cast(tensor: Any, dtype: str) -> Any:
    return tf.cast(tensor, dtype) if _is_floating(tensor) else tensor


def _step(layer: keras.Layer, calls: list[_Call], inputs: list[list[Any]]) -> list[Any]:
    """The outputs and gradients of a layer in all its calls."""
    found: list[Any] = []
    with keras.StatelessScope():  # assigns nothing
        for call, tensors in zip(calls, inputs, strict=True):
            wanted = [x for x, has_gradient in zip(tensors, call.has_gradient, strict=True) if has_gradient]
            leaves = keras.tree.flatten(call.arguments)
            for place, tensor in zip(call.places, tensors, strict=True):
                leaves[place] = tensor
            args, kwargs = keras.tree.pack_sequence_as(call.arguments, leaves)
            with tf.GradientTape() as tape:
                tape.watch(wanted)
                outputs = floating_tensors(layer(*args, **kwargs))
            sources = wanted + [variable.value for variable in layer.trainable_weights]
            gradients = tape.gradient(outputs, sources) if outputs and sources else []
            found += [*outputs, *(x for x in gradients if x is not None)]
    return found


class _Timer:
    """Times a function in blocks, for `interleave`."""

    def __init__(self, step: Callable[[], Any], clock: Callable[[], float] = time.perf_counter):
        self._step, self._clock = step, clock
        seconds = self._block(3)
        self._steps = max(1, min(_MOST_STEPS, round(_BLOCK_SECONDS / max(seconds, 1e-9))))

    def __call__(self) -> StepTimes:
        samples = tuple(1000 * self._block(self._steps) for _ in range(_BLOCKS))
        return StepTimes(repeats_ms=(samples,), steps_per_sample=self._steps, first_step_seconds=0.0)

    def _block(self, steps: int) -> float:
        """Seconds per step."""
        started = self._clock()
        for _ in range(steps):
            self._step()
        wait()
        return (self._clock() - started) / steps


def _cast_ms(dtype: str, jit_compile: bool) -> float:
    """Milliseconds to cast one element to 16 bits and one back."""
    values = tf.ones([_CAST_ELEMENTS])
    back_and_forth = tf.function(
        lambda x: (tf.cast(x, dtype), tf.cast(tf.cast(x, dtype), "float32")), autograph=False, jit_compile=jit_compile
    ).get_concrete_function(values)
    timer = _Timer(partial(back_and_forth, values))
    return min(timer().samples_ms) / _CAST_ELEMENTS
