"""What keeps XLA from compiling a model: settings and layers, found without tracing, and operations.

To find operations, a step is lowered to HLO, which neither compiles nor runs it.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import summarize_error
from tfopt.internals.graphs import devices_with_kernel
from tfopt.internals.runtime import is_op_determinism_enabled
from tfopt.repairs import recomputation_refused
from tfopt.repairs.xla_operations import wrong_under_xla
from tfopt.xla.traced_graph import TracedOperation, layer_of, recorded_scopes, traced_operations

_Where = tuple[str | None, str | None]
_SMALL = 16  # elements
_NO_NUMBERS = (tf.string, tf.resource, tf.variant)
# TensorFlow's words where an index or a label lies outside its table.
_OUT_OF_RANGE = re.compile(r"indices.* is not in \[0, |does not index into|outside the valid range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Something that keeps XLA off for a model or would fail under it."""

    kind: str
    """A setting ("run_eagerly", "replicas", "determinism"), a "layer" for which Keras keeps XLA off, an "operation"
    without an XLA kernel, a "compilation" that fails although there are kernels, a "recompilation" for each new value
    in a batch or a variable, or "results": an operation that is wrong under XLA, or a result that differs."""
    found: str
    """What was found, as a sentence."""
    remedy: str
    """What to do."""
    layer: str | None = None
    """Path of the layer at fault; None outside all layers."""
    operation: str | None = None
    """Type of the operation at fault, such as "EagerPyFunc"; None if there is no single one."""
    line: str | None = None
    """File and line of the user's code that made the operation: "/home/me/net.py:41". None if unknown."""

    def to_dict(self) -> dict[str, str | None]:
        """Returns JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.found}. {self.remedy}"


def standing_obstacles(model: keras.Model) -> tuple[Obstacle, ...]:
    """Returns what keeps XLA off for a model regardless of its operations, without tracing it."""
    return (*_settings(model), *map(_layer_obstacle, _layers_without_jit(model)))


def _settings(model: keras.Model) -> Iterator[Obstacle]:
    if model.run_eagerly:
        yield Obstacle(
            kind="run_eagerly",
            found="the model runs eagerly (run_eagerly=True)",
            remedy="Compile it with run_eagerly=False.",
        )
    strategy = model._distribute_strategy
    devices = len(strategy.extended.worker_devices) if strategy else 1
    if devices > 1:
        yield Obstacle(
            kind="replicas",
            found=f"the model trains on {devices} devices of this process, and XLA compiles one program for all, "
            "which can only reach the variables of one device",
            remedy="Leave XLA off, or run one process for each device.",
        )
    if is_op_determinism_enabled():
        yield Obstacle(
            kind="determinism",
            found="op determinism is on, and Keras turns XLA off for it",
            remedy="Leave XLA off, or remove tf.config.experimental.enable_op_determinism().",
        )


def _layers_without_jit(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Outermost layers without XLA support. Their parts need not be listed."""
    if not layer.supports_jit:
        yield layer
    else:
        for part in layer._flatten_layers(include_self=False, recursive=False):
            yield from _layers_without_jit(part)


def _layer_obstacle(layer: keras.Layer) -> Obstacle:
    return Obstacle(
        kind="layer",
        found=f"layer {layer.path or layer.name} ({type(layer).__name__}) does not support XLA",
        remedy=_remedy(layer),
        layer=layer.path or layer.name,
    )


def _remedy(layer: keras.Layer) -> str:
    if isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
        return "Create it with use_cudnn=False, and measure whether that pays: tfopt.xla.decide(model, data)."
    if ".preprocessing." in type(layer).__module__:
        return "Move it from the model to the input pipeline: dataset.map(lambda x, y: (layer(x), y))."
    return "Its class sets supports_jit = False: set True if its operations compile, or move it to the input pipeline."


_PIPELINE = "in the input pipeline (dataset.map)"
# The first pattern that matches the operation's type counts. XLA compiles only numeric operations.
_REMEDIES = (
    ("PyFunc", f"Write it with TensorFlow or keras.ops operations, or run it {_PIPELINE}."),
    ("Print|StringFormat", "Remove the print from the step; a callback can print what `fit` logs."),
    (
        "Bicubic|Lanczos|ResizeArea|ScaleAndTranslate",
        f"Resize bilinearly or by nearest neighbours, or do it {_PIPELINE}.",
    ),
    ("CropAndResize|ImageProjective", f"Transform images {_PIPELINE}, or slice and resize bilinearly."),
    ("Decode|Encode|Parse|ReadFile", f"Read and decode {_PIPELINE}."),
    ("String|Regex|Lookup|Hash", f"Turn strings into numbers {_PIPELINE}."),
    ("Cudnn", "Make the layer with use_cudnn=False."),
    ("Summary", "Write summaries from a callback."),
)
_OTHERWISE = f"Move it {_PIPELINE} if it needs no weights, write it with other operations, or leave XLA off."


def obstacles_of(step: Callable[[Any], Any], batch: Any) -> tuple[Obstacle, ...]:
    """Returns what keeps XLA from compiling a step, each with its layer; raises ValueError if it rejects the batch."""
    function = _function(step)
    graph, scopes = _traced(function, batch)
    hlo, refusal = _translated(function, batch)
    operations = list(traced_operations(graph, scopes))
    if refusal:
        return _unsupported_operations(operations) or (_refused(refusal, operations, scopes),)
    constants = [f"tensor {part} of the batch" for part in _constants(function, batch, len(graph.captures), hlo)]
    constants += _constant_variables(function, batch, graph.variables, hlo)
    return (*wrong_operations(operations), *map(_recompiled, constants))


def wrong_operations_of(step: Callable[[Any], Any], batch: Any) -> tuple[Obstacle, ...]:
    """As `obstacles_of`, but only the operations that XLA gets wrong: the step is traced and not lowered."""
    return wrong_operations(traced_operations(*_traced(_function(step), batch)))


def _function(step: Callable[[Any], Any]) -> Any:
    return tf.function(tf.autograph.experimental.do_not_convert(step), jit_compile=True)


def _traced(function: Any, batch: Any) -> tuple[tf.Graph, dict[str, keras.Layer]]:
    with recorded_scopes() as scopes, recomputation_refused(), batch_refused():
        return function.get_concrete_function(batch).graph, scopes


def device() -> str:
    """Returns the kind of device that models train on here, "GPU" or "CPU"."""
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


@contextmanager
def batch_refused() -> Iterator[None]:
    """Turns a step's error about its batch into a ValueError that says what to do."""
    try:
        with indices_refused():
            yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error.__cause__, tf.errors.OpError):
            raise
        raise ValueError(
            f"Expected a batch (x, y[, sample_weight]) that the training step takes. Found: {summarize_error(error)}. "
            "Pass the data that fit receives."
        ) from error


@contextmanager
def indices_refused() -> Iterator[None]:
    """Turns a step's error about indices or labels into a ValueError that says what XLA makes of them."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = summarize_error(error)
        if not _OUT_OF_RANGE.search(found):
            raise
        raise ValueError(
            f"Expected indices and labels within the range of what they choose from. Found: {found}. Correct the "
            "data, or enlarge the layer that they index, and leave XLA off until then: where TensorFlow raises this "
            "error on a CPU, XLA silently computes with another entry, or NaN (docs/repairs.md, D29)."
        ) from error


def _translated(function: Any, batch: Any) -> tuple[str, str | None]:
    """Returns HLO and None, or "" and why XLA cannot lower it."""
    name = tf.config.list_logical_devices(device())[0].name
    with warnings.catch_warnings():
        # Without a device name TensorFlow draws a random number to pick one, which advances the global seed.
        warnings.filterwarnings("ignore", message="device_name is being deprecated")
        try:
            return function.experimental_get_compiler_ir(batch)(stage="hlo", device_name=name), None
        except (ValueError, tf.errors.OpError) as error:
            return "", str(error)


def _refused(refusal: str, operations: Iterable[TracedOperation], scopes: Mapping[str, keras.Layer]) -> Obstacle:
    """The obstacle if XLA has a kernel for every operation but refuses to compile."""
    node = re.search(r"\{\{node ([^}]+)\}\}", refusal)
    layer = layer_of(node[1], scopes) if node else None
    line = next((one.line for one in operations if node and one.operation.name == node[1]), None)
    first = refusal.removeprefix("Failed getting HLO text: '").split("\n")[0].rstrip(" '")
    where = (f"layer {layer}" if layer else "the step") + _at(line)
    return Obstacle(
        kind="compilation",
        found=f"XLA cannot compile {where}: {first}",
        remedy="Use shapes that do not depend on values, or leave XLA off.",
        layer=layer,
        line=line,
    )


def _constants(function: Any, batch: Any, captured: int, hlo: str) -> list[int]:
    """Numbers of the batch's tensors whose values XLA compiled into the program.

    Such a tensor is not a parameter of the program. If parameters are missing, their shapes may not tell which, so each
    tensor is tried with other values, which change the program if they are constants. Empty tensors have no values.
    Besides the batch, the step takes `captured` tensors.
    """
    tensors = tf.nest.flatten(batch, expand_composites=True)
    filled = [number for number, tensor in enumerate(tensors) if tensor.shape.num_elements()]
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", hlo)
    parameters = re.findall(r"\w+\[[\d,]*\]", layout[1]) if layout else []
    if len(parameters) == len(filled) + captured:
        return []
    others = ((number, other) for number in filled for other in _changed(batch, tensors, number))
    return list(dict.fromkeys(number for number, other in others if _translated(function, other)[0] != hlo))


def _changed(batch: Any, tensors: list[Any], number: int) -> Iterator[Any]:
    """The batch with other values in one tensor: other ones, and the same elsewhere, which moves a maximum."""
    tensor = tensors[number]
    for other in (_others(tensor), tf.reshape(tf.reverse(tf.reshape(tensor, [-1]), [0]), tensor.shape)):
        parts = [*tensors[:number], other, *tensors[number + 1 :]]
        yield tf.nest.pack_sequence_as(batch, parts, expand_composites=True)


def _others(tensor: Any) -> Any:
    return ~tensor if tensor.dtype.is_bool else tensor + tf.ones_like(tensor)


def _constant_variables(function: Any, batch: Any, variables: Sequence[Any], hlo: str) -> list[str]:
    """Names of the variables whose values XLA compiled into the program, such as a seed that a position is drawn from.

    Each is changed temporarily. Sizes, positions and seeds are small, so the larger variables are left alone.
    """

    def are_constants(changed: Sequence[Any]) -> bool:
        before = [one.numpy() for one in changed]
        try:
            for one in changed:
                one.assign(_others(one.value()))
            return _translated(function, batch)[0] != hlo
        finally:
            for one, value in zip(changed, before, strict=True):
                one.assign(value)

    small = [
        one for one in variables if one.dtype not in _NO_NUMBERS and (one.shape.num_elements() or math.inf) <= _SMALL
    ]
    return [one.name for one in small if are_constants([one])] if small and are_constants(small) else []


def _recompiled(what: str) -> Obstacle:
    return Obstacle(
        kind="recompilation",
        found=f"a size, a position or an axis in the step depends on the values of {what}, so XLA compiles it again "
        "for each new one",
        remedy="Give it a fixed size, and take elements from a position that varies with tf.gather(x, start + "
        "tf.range(size), axis=...) or tf.roll, which compile once; or leave XLA off.",
    )


def _unsupported_operations(operations: Iterable[TracedOperation]) -> tuple[Obstacle, ...]:
    """Operations without an XLA kernel.

    The graph must have been lowered once, because XLA registers its kernels on first use.
    """
    compiler = f"XLA_{device()}_JIT"
    found: dict[_Where, Obstacle] = {}
    for one in operations:
        kind = one.operation.type
        if compiler not in devices_with_kernel(kind):
            remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, kind)), _OTHERWISE)
            _keep(found, _obstacle("operation", "XLA has no kernel for", one, "", remedy))
    return tuple(found.values())


def wrong_operations(operations: Iterable[TracedOperation]) -> tuple[Obstacle, ...]:
    """Operations that XLA runs and gets wrong, as tfopt.repairs lists them."""
    found: dict[_Where, Obstacle] = {}
    for one in operations:
        wrong = wrong_under_xla(one.operation)
        if wrong:
            _keep(found, _obstacle("results", "XLA gets", one, f" wrong: {wrong.defect}", wrong.remedy))
    return tuple(found.values())


def _keep(found: dict[_Where, Obstacle], obstacle: Obstacle) -> None:
    """Keeps the first obstacle of an operation's type in a layer whose line is known, else the first."""
    where = obstacle.operation, obstacle.layer
    if where not in found or (found[where].line is None and obstacle.line):
        found[where] = obstacle


def _obstacle(kind: str, what: str, one: TracedOperation, why: str, remedy: str) -> Obstacle:
    where = f"in layer {one.layer}" if one.layer else "outside every layer"
    operation = one.operation
    return Obstacle(
        kind=kind,
        found=f"{what} {operation.type} {where} ({operation.name}{_at(one.line)}){why}",
        remedy=remedy,
        layer=one.layer,
        operation=operation.type,
        line=one.line,
    )


def _at(line: str | None) -> str:
    return f" at {line}" if line else ""
