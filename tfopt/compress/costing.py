"""`cost`: what each layer of a model costs in a training step, counted and measured."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from textwrap import shorten
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.compress.model_cost import LayerCost, ModelCost
from tfopt.compress.versions.requirements import require_one_device
from tfopt.errors import PipelineError, TfoptError, UnsupportedError, summarize_error
from tfopt.hardware import gpus, host
from tfopt.measure import copy_gib_per_second, interleave, matmul_tflops
from tfopt.measure.layer_steps import BlockTimer, outputs, outputs_and_gradients
from tfopt.measure.timers import StepTimer
from tfopt.model.batches import Data, as_dataset, batch_size, first_batch, on_device, specs_of
from tfopt.model.flops import graph_flops, step_flops
from tfopt.model.layers import is_keras_own, layer_paths, require_optimizer
from tfopt.model.step_calls import StepCall, StepCalls, kind_of
from tfopt.model.undoing import only_looks
from tfopt.precision import alignment
from tfopt.warn import warn_caller

_TURNS = 5
_STEPS, _SAMPLES = 20, 10  # of the whole step
_RATED = ("bfloat16", "float16", "tensorfloat32", "float32", "float64")  # by `matmul_tflops`


@only_looks
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
        ValueError: If the model is not compiled with an optimizer, or calls no layers.
        tfopt.errors.PipelineError: If the dataset or the batch is empty.
        tfopt.errors.UnsupportedError: If the model has no `call`, trains on several replicas, runs eagerly and its step
            cannot be traced, or does not train on the batch.

    Example:
        >>> print(tfopt.compress.cost(model, dataset))
        resnet at batch size 32 takes 48.1 ms a step; conv2 takes 31.2 % of it, bound by its matrix products.
        …
    """
    return cost_and_calls(model, batch)[0]


def cost_and_calls(model: keras.Model, batch: Data) -> tuple[ModelCost, list[StepCall]]:
    """Returns what `cost` does, and the recorded call of each of its layers."""
    require_optimizer(model)
    require_one_device(model)
    if model.run_eagerly:
        warn_caller(
            f"{model.name!r} runs eagerly, while its layers are timed in graphs: most of the rest of its step is time "
            "that Python takes. Compile it without run_eagerly=True."
        )
    examples = on_device(model, first_batch(model, as_dataset(batch)))
    with _step_runs(model, examples):
        size = _batch_size(model, examples)
        step = StepTimer(model, tf.data.Dataset.from_tensors(examples))  # which builds the model
        step(1, warmup=0, samples=1)
    known = step_flops(model, step.graph, [], size)
    recorded = _recorded(model, examples)
    measured: dict[Any, _Measured] = {}
    kinds = [kind_of(call.layer, [call]) for call in recorded]
    for kind, call in zip(kinds, recorded, strict=True):
        if kind not in measured:
            measured[kind] = _measure(model, call)
    rates = _Rates({one.dtype for one in measured.values()}.union(*(one.flops for one in measured.values())))
    rates.measure()
    step_ms = min(step(_STEPS, samples=_SAMPLES).samples_ms)
    rates.measure()
    paths, misses = layer_paths(model), _misses(model, size)
    times: Counter[keras.Layer] = Counter()
    seen: set[int] = set()
    layers = []
    for kind, call in zip(kinds, recorded, strict=True):
        times[call.layer] += 1
        path = paths[call.layer] + (f" ({times[call.layer]})" if times[call.layer] > 1 else "")
        layers.append(_row(call, measured[kind], path, _parameters(call.layer, seen), rates, misses))
    found = ModelCost(
        model=model.name,
        batch_size=size,
        device=_device(),
        layers=tuple(layers),
        step_ms=step_ms,
        step_flops=None if known.unknown else sum(known.by_dtype.values()),
        matmul_tflops=rates.tflops,
        copy_gib_per_second=rates.copy,
    )
    return found, recorded


@contextmanager
def _step_runs(model: keras.Model, batch: Any) -> Iterator[None]:
    """Raises an UnsupportedError if a training step on a batch raises in the block."""
    try:
        yield
    except (TfoptError, Warning, tf.errors.ResourceExhaustedError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"Expected a batch that {model.name!r} trains on. Found: on {specs_of(batch)} its training step raises "
            f"{type(error).__name__}: {summarize_error(error)}. What to do: make model.fit run on this batch first."
        ) from error


def _batch_size(model: keras.Model, batch: Any) -> int:
    size = batch_size(model, batch)
    if not size:
        raise PipelineError(
            f"Expected a batch of at least one example. Found: {specs_of(batch)}. Check the dataset's source and its "
            "filters."
        )
    return size


def _recorded(model: keras.Model, batch: Any) -> list[StepCall]:
    """Returns the calls of the layers in a step."""
    try:
        calls = StepCalls(model, batch).calls
    except (TfoptError, Warning, tf.errors.ResourceExhaustedError):
        raise
    except NotImplementedError as error:
        raise UnsupportedError(
            f"Expected a model that computes its outputs by a call. Found: {model.name!r}, whose train_step calls its "
            "parts. What to do: compile each part with a loss, and pass it with its own inputs."
        ) from error
    except Exception as error:
        raise UnsupportedError(
            f"Expected a model whose step is model(x), and its loss, of a batch (x, y[, sample_weight]). Found: "
            f"{model.name!r}, with which that raises {type(error).__name__}: {summarize_error(error)}. What to do: "
            "compile what its train_step calls with a loss, and pass it with its own inputs."
        ) from error
    if not calls:
        raise ValueError(
            f"Expected a model whose step calls layers. Received: {model.name!r}, which calls none. Pass a model of "
            "Keras layers."
        )
    return calls


class _Measured(NamedTuple):
    """What identical layers share."""

    dtype: str
    """Of most products, or that in which the layer computes."""
    flops: Counter[str]
    """By dtype, forward and backward."""
    forward_flops: int
    unknown: tuple[str, ...]
    output_bytes: int
    ms: tuple[float, float] | None  # forward, and backward


class _Rates:
    """The best rates of this machine; measured twice, since other load can only lower them."""

    def __init__(self, dtypes: Iterable[str]):
        self.tflops = dict.fromkeys(sorted(set(dtypes).intersection(_RATED)), 0.0)
        self.copy = 0.0

    def measure(self) -> None:
        """Measures each rate, and keeps the best so far."""
        self.tflops = {dtype: max(rate, matmul_tflops(dtype)) for dtype, rate in self.tflops.items()}
        self.copy = max(self.copy, copy_gib_per_second())

    def products_ms(self, flops: Counter[str]) -> float | None:
        """Returns the milliseconds that FLOPs take at these rates; None if one of these dtypes has no rate."""
        if not self.tflops.keys() >= flops.keys():
            return None
        return sum(count / (1e9 * self.tflops[dtype]) for dtype, count in flops.items())

    def memory_ms(self, moved: int) -> float:
        """Returns the milliseconds that bytes take at this rate."""
        return 1000 * moved / (self.copy * 2**30)


def _measure(model: keras.Model, call: StepCall) -> _Measured:
    compiled = {"autograph": False, "jit_compile": bool(model.jit_compile)}
    forward, both = (tf.function(partial(run, [call]), **compiled) for run in (outputs, outputs_and_gradients))
    inputs = [call.tensors]
    computes_in = _rated_as(call.layer.compute_dtype)
    try:
        steps = {"forward": forward.get_concrete_function(inputs), "both": both.get_concrete_function(inputs)}
        counted = {name: graph_flops(step.graph) for name, step in steps.items()}
        output_bytes = _bytes(steps["forward"](inputs))
        steps["both"](inputs)
    except tf.errors.ResourceExhaustedError:
        raise
    except Exception as error:  # noqa: BLE001 - a layer that cannot be called outside its model may raise anything
        return _Measured(computes_in, Counter(), 0, (reason(error),), 0, None)
    finally:
        model._clear_losses()
    flops: Counter[str] = Counter()
    for dtype, count in counted["both"].by_dtype.items():
        flops[_rated_as(dtype)] += count
    times = interleave({name: BlockTimer(partial(step, inputs)) for name, step in steps.items()}, _TURNS)
    # The fastest blocks: other load on the machine can only add time.
    forward_ms, both_ms = (min(times[name].samples_ms) for name in steps)
    return _Measured(
        dtype=max(flops, key=flops.__getitem__, default=computes_in),
        flops=+flops,
        forward_flops=sum(counted["forward"].by_dtype.values()),
        unknown=(
            *(f"{name} ({why})" for name, why in counted["both"].unknown.items()),
            *(["products with a sparse tensor"] if any(isinstance(x, tf.SparseTensor) for x in call.tensors) else ()),
        ),
        output_bytes=output_bytes,
        ms=(forward_ms, max(0.0, both_ms - forward_ms)),
    )


def reason(error: Exception) -> str:
    """Returns the beginning of what an error says, for a table."""
    return shorten(summarize_error(error), 120, placeholder="…")


def _row(
    call: StepCall, of_kind: _Measured, path: str, parameters: int, rates: _Rates, misses: dict[str, str]
) -> LayerCost:
    layer = call.layer
    forward_bytes, backward_bytes = _moved(call, of_kind.output_bytes)
    return LayerCost(
        path=path,
        kind=type(layer).__name__,
        own=not is_keras_own(layer),
        parameters=parameters,
        inputs=tuple(tuple(tensor.shape) for tensor in call.tensors),
        dtype=of_kind.dtype,
        forward_flops=of_kind.forward_flops,
        backward_flops=of_kind.flops.total() - of_kind.forward_flops,
        unknown=of_kind.unknown,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        forward_ms=of_kind.ms and of_kind.ms[0],
        backward_ms=of_kind.ms and of_kind.ms[1],
        least_products_ms=rates.products_ms(of_kind.flops),
        least_memory_ms=rates.memory_ms(forward_bytes + backward_bytes),
        tensor_cores="; ".join(text for one, text in misses.items() if f"{one}/".startswith(f"{layer.path}/")),
    )


def _parameters(layer: keras.Layer, seen: set[int]) -> int:
    """Returns the number of a layer's parameters that are not in a set, and adds them."""
    new = [weight for weight in layer.weights if id(weight) not in seen]
    seen.update(map(id, new))
    return sum(math.prod(weight.shape) for weight in new)


def _moved(call: StepCall, output_bytes: int) -> tuple[int, int]:
    """Returns the least bytes that a call moves forward, and backward."""
    taken = _bytes(call.tensors)
    given = _bytes(tensor for tensor, wanted in zip(call.tensors, call.has_gradient, strict=True) if wanted)
    weights, trained = _weight_bytes(call, output_bytes)
    forward = taken + weights + output_bytes
    if not (given or trained):
        return forward, 0
    return forward, output_bytes + taken + (weights if given else 0) + given + trained


def _weight_bytes(call: StepCall, output_bytes: int) -> tuple[int, int]:
    """Returns the bytes of the weights that a call reads, and of those of which training takes a gradient."""
    layer = call.layer
    weights, trained = layer.weights, layer.trainable_weights
    if isinstance(layer, keras.layers.Embedding):
        args, kwargs = call.arguments
        if not (kwargs.get("reverse") or any(args[1:])):  # only the rows that are looked up
            rows = output_bytes // tf.as_dtype(layer.compute_dtype).size * weights[0].value.dtype.size
            return rows, rows if trained else 0
        if not getattr(layer, "tie_weights", True):
            weights, trained = ([w for w in some if "reverse" in w.name] for some in (weights, trained))
    return _bytes(w.value for w in weights), _bytes(w.value for w in trained)


def _bytes(values: Iterable[Any]) -> int:
    """Returns the bytes of tensors, each once."""
    different = {id(value): value for value in values}
    parts = tf.nest.flatten(list(different.values()), expand_composites=True)  # of ragged and sparse ones
    return sum(part.shape.num_elements() * part.dtype.size for part in parts)


def _rated_as(dtype: str) -> str:
    """Returns the precision of products of a dtype, under the name that `matmul_tflops` takes if it can."""
    rounds = bool(gpus()) and tf.config.experimental.tensor_float_32_execution_enabled()
    return "tensorfloat32" if dtype == "float32" and rounds else str(dtype)


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
