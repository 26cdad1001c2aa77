"""`cost`: what each layer of a model costs in a training step, counted and measured."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.compress.model_cost import LayerCost, ModelCost
from tfopt.compress.versions.arguments import require_one_device
from tfopt.errors import UnsupportedError
from tfopt.hardware import gpus, host
from tfopt.measure import copy_gib_per_second, interleave, matmul_tflops
from tfopt.measure.layer_steps import BlockTimer, outputs, outputs_and_gradients
from tfopt.measure.timers import StepTimer
from tfopt.model.batches import Data, as_dataset, batch_size, first_batch, on_device
from tfopt.model.flops import graph_flops
from tfopt.model.layers import is_keras_own, layer_paths, require_compiled
from tfopt.model.step_calls import StepCall, StepCalls, kind_of
from tfopt.precision import alignment

_TURNS = 5
_STEPS, _SAMPLES = 20, 10  # of the whole step
_HALF = ("bfloat16", "float16")


def cost(model: keras.Model, batch: Data) -> ModelCost:
    """Measures what each layer of a model costs in a training step, and what keeps it from being faster.

    Use it to see which layers are worth making cheaper. Each layer runs alone, forward and backward, on the inputs that
    it has in a training step, compiled as the model is; identical layers are timed once. The model stays as it is, bit
    for bit. Each layer of a nested model has its own row, and a shared layer has one per call. Whatever a layer other
    than a model contains counts as part of it.

    A layer's ceiling is the longer of two times: its FLOPs at the rate of a large matrix product, and the bytes it must
    move at the rate of a large copy, both measured here (the roofline of Williams, Waterman and Patterson, 2009).

    Args:
        model: A compiled model; it is built if it is not.
        batch: One batch `(x, y[, sample_weight])`, or a dataset of batches, of which the first is used.

    Returns:
        Parameters, FLOPs, bytes, milliseconds and the binding ceiling of each layer, and the time of the whole step.

    Raises:
        TypeError: If `model` is not a Keras model, or `batch` is neither a batch nor a dataset.
        ValueError: If the model is not compiled, or calls no layers.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.UnsupportedError: If the model has no `call`, trains on several replicas, or runs eagerly and its
            step cannot be traced.

    Example:
        >>> print(tfopt.compress.cost(model, dataset))
        resnet at batch size 32 takes 48.1 ms a step; conv2 takes 31.2 % of it, bound by its matrix products.
        …
    """
    return cost_and_calls(model, batch)[0]


def cost_and_calls(model: keras.Model, batch: Data) -> tuple[ModelCost, list[StepCall]]:
    """Returns what `cost` does, and the recorded call of each of its layers."""
    require_one_device(require_compiled(model))
    examples = on_device(model, first_batch(model, as_dataset(batch)))
    step = StepTimer(model, examples)  # which builds the model
    try:
        recorded = StepCalls(model, examples)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"Expected a model that computes its outputs by a call. Found: {model.name!r}, whose train_step calls its "
            "parts. What to do: compile each part with a loss, and pass it with its own inputs."
        ) from error
    if not recorded.calls:
        raise ValueError(
            f"Expected a model whose step calls layers. Received: {model.name!r}, which calls none. Pass a model of "
            "Keras layers."
        )
    rates = _Rates({_computes_in(call.layer) for call in recorded.calls})
    rates.measure()
    measured: dict[Any, _Measured] = {}
    kinds = [kind_of(call.layer, [call]) for call in recorded.calls]
    for kind, call in zip(kinds, recorded.calls, strict=True):
        if kind not in measured:
            measured[kind] = _measure(model, call)
    rates.measure()
    paths, misses = layer_paths(model), _misses(model, batch_size(model, examples))
    times: Counter[keras.Layer] = Counter()
    layers = []
    for kind, call in zip(kinds, recorded.calls, strict=True):
        times[call.layer] += 1
        layers.append(_row(call, measured[kind], paths[call.layer], times[call.layer], rates, misses))
    found = ModelCost(
        model=model.name,
        batch_size=batch_size(model, examples),
        device=_device(),
        layers=tuple(layers),
        step_ms=min(step(_STEPS, samples=_SAMPLES).samples_ms),
        matmul_tflops=rates.tflops,
        copy_gib_per_second=rates.copy,
    )
    return found, recorded.calls


class _Measured(NamedTuple):
    """What identical layers share."""

    forward_flops: int
    backward_flops: int
    unknown: tuple[str, ...]
    output_bytes: int
    ms: tuple[float, float] | None  # forward, and backward


class _Rates:
    """The best rates of this machine; measured twice, since other load can only lower them."""

    def __init__(self, dtypes: Iterable[str]):
        self.tflops = dict.fromkeys(sorted(dtypes), 0.0)
        self.copy = 0.0

    def measure(self) -> None:
        """Measures each rate, and keeps the best so far."""
        self.tflops = {dtype: max(rate, matmul_tflops(dtype)) for dtype, rate in self.tflops.items()}
        self.copy = max(self.copy, copy_gib_per_second())

    def least_ms(self, dtype: str, flops: int, moved: int) -> tuple[float, float]:
        """Returns the milliseconds that FLOPs and bytes take at these rates."""
        return 1000 * flops / (1e12 * self.tflops[dtype]), 1000 * moved / (self.copy * 2**30)


def _measure(model: keras.Model, call: StepCall) -> _Measured:
    compiled = {"autograph": False, "jit_compile": bool(model.jit_compile)}
    forward, both = (tf.function(partial(run, [call]), **compiled) for run in (outputs, outputs_and_gradients))
    inputs = [call.tensors]
    try:
        steps = {"forward": forward.get_concrete_function(inputs), "both": both.get_concrete_function(inputs)}
        counted = {name: graph_flops(step.graph) for name, step in steps.items()}
        output_bytes = _bytes(tensor for tensor in steps["forward"].structured_outputs if tensor is not None)
        for step in steps.values():
            step(inputs)
    except tf.errors.ResourceExhaustedError:
        raise
    except Exception:  # noqa: BLE001 - a layer that cannot be called outside its model may raise anything
        return _Measured(0, 0, ("it does not run alone",), 0, None)
    finally:
        model._clear_losses()
    flops = {name: sum(found.by_dtype.values()) for name, found in counted.items()}
    times = interleave({name: BlockTimer(partial(step, inputs)) for name, step in steps.items()}, _TURNS)
    # The fastest blocks: other load on the machine can only add time.
    forward_ms, both_ms = (min(times[name].samples_ms) for name in steps)
    return _Measured(
        forward_flops=flops["forward"],
        backward_flops=flops["both"] - flops["forward"],
        unknown=tuple(f"{name} ({reason})" for name, reason in counted["both"].unknown.items()),
        output_bytes=output_bytes,
        ms=(forward_ms, max(0.0, both_ms - forward_ms)),
    )


def _row(
    call: StepCall, of_kind: _Measured, path: str, number: int, rates: _Rates, misses: dict[str, str]
) -> LayerCost:
    layer, dtype = call.layer, _computes_in(call.layer)
    forward_bytes, backward_bytes = _moved(call, of_kind.output_bytes)
    products, memory = rates.least_ms(
        dtype, of_kind.forward_flops + of_kind.backward_flops, forward_bytes + backward_bytes
    )
    return LayerCost(
        path=path if number == 1 else f"{path} ({number})",
        kind=type(layer).__name__,
        own=not is_keras_own(layer),
        parameters=layer.count_params() if number == 1 else 0,
        inputs=tuple(tuple(tensor.shape) for tensor in call.tensors),
        dtype=dtype,
        forward_flops=of_kind.forward_flops,
        backward_flops=of_kind.backward_flops,
        unknown=of_kind.unknown,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        forward_ms=of_kind.ms and of_kind.ms[0],
        backward_ms=of_kind.ms and of_kind.ms[1],
        least_products_ms=products,
        least_memory_ms=memory,
        tensor_cores="; ".join(text for one, text in misses.items() if f"{one}/".startswith(f"{layer.path}/")),
    )


def _moved(call: StepCall, output_bytes: int) -> tuple[int, int]:
    """Returns the least bytes that a call moves forward, and backward."""
    layer = call.layer
    taken = _bytes(call.tensors)
    given = _bytes(tensor for tensor, wanted in zip(call.tensors, call.has_gradient, strict=True) if wanted)
    weights, trained = (_bytes(w.value for w in some) for some in (layer.weights, layer.trainable_weights))
    if isinstance(layer, keras.layers.Embedding):  # only the rows that are looked up
        weights, trained = output_bytes, output_bytes if trained else 0
    forward = taken + weights + output_bytes
    if not (given or trained):
        return forward, 0
    return forward, output_bytes + taken + (weights if given else 0) + given + trained


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)


def _computes_in(layer: keras.Layer) -> str:
    """Returns the precision that a layer multiplies in, under the name that `matmul_tflops` takes."""
    if layer.compute_dtype in _HALF:
        return str(layer.compute_dtype)
    rounds = bool(gpus()) and tf.config.experimental.tensor_float_32_execution_enabled()
    return "tensorfloat32" if rounds else "float32"


def _misses(model: keras.Model, size: int) -> dict[str, str]:
    """Returns the sizes that do not suit Tensor Cores, by Keras' path of the layer."""
    try:
        found = alignment(model, size).misses
    except ValueError:  # no layer that multiplies
        return {}
    texts: dict[str, list[str]] = {}
    for miss in found:
        for path in miss.layers:
            texts.setdefault(path, []).append(f"{miss.dimension} {miss.size:,} → {miss.next_size:,}")
    return {path: ", ".join(parts) for path, parts in texts.items()}


def _device() -> str:
    found = gpus()
    return found[0].name if found else host().cpu_model or "this CPU"
