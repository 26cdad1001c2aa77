"""A step as XLA sees it: translated into HLO, and neither compiled nor run."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.xla.obstacles import Obstacle
from tfopt.xla.operations import layer_of, recorded_scopes, unsupported_operations


def obstacles_of(step: Callable[[Any], Any], batch: Any) -> tuple[Obstacle, ...]:
    """What XLA says against a step, each in its layer.

    Args:
        step: A function of the batch.
        batch: Tensors, as the step gets them.

    Raises:
        ValueError: The step does not take the batch.
    """
    function = tf.function(tf.autograph.experimental.do_not_convert(step), jit_compile=True)
    with recorded_scopes() as scopes, batch_refused():
        graph = function.get_concrete_function(batch).graph
    hlo, refusal = _translated(function, batch)
    if refusal:
        return unsupported_operations(graph, scopes, device()) or (_refused(refusal, scopes),)
    return tuple(_recompiled(part) for part in _constants(function, batch, len(graph.captures), hlo))


def device() -> str:
    """The kind of device that a model trains on here: "GPU" or "CPU"."""
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


@contextmanager
def batch_refused() -> Iterator[None]:
    """Says what to do where a step does not take its batch."""
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(
            f"Expected a batch (x, y[, sample_weight]) that the training step takes. Found: {error} "
            "Give the data that fit gets."
        ) from error


def _translated(function: Any, batch: Any) -> tuple[str, str | None]:
    """A step's HLO and None, or nothing and why XLA has none."""
    name = tf.config.list_logical_devices(device())[0].name
    with warnings.catch_warnings():
        # Without a device's name TensorFlow draws a random number to find one, which moves the global seed on.
        warnings.filterwarnings("ignore", message="device_name is being deprecated")
        try:
            return function.experimental_get_compiler_ir(batch)(stage="hlo", device_name=name), None
        except (ValueError, tf.errors.OpError) as error:
            return "", str(error)


def _refused(refusal: str, scopes: Mapping[str, keras.Layer]) -> Obstacle:
    """What XLA says where it has a kernel for every operation."""
    node = re.search(r"\{\{node ([^}]+)\}\}", refusal)
    layer = layer_of(node[1], scopes) if node else None
    first = refusal.removeprefix("Failed getting HLO text: '").split("\n")[0].rstrip(" '")
    return Obstacle(
        kind="compilation",
        found=f"XLA cannot compile {f'layer {layer}' if layer else 'the step'}: {first}",
        remedy="Give it shapes that do not depend on values, or leave XLA off.",
        layer=layer,
    )


def _constants(function: Any, batch: Any, captured: int, hlo: str) -> list[int]:
    """The tensors of a batch, by number, whose values are part of the program.

    They are no parameters of it. Where parameters are missing, of which shapes need not tell, other values do: they
    give another program or none. Tensors without numbers have no values.

    Args:
        function: The step.
        batch: What it was translated with.
        captured: How many tensors it takes besides the batch.
        hlo: Its program.
    """
    tensors = tf.nest.flatten(batch, expand_composites=True)
    filled = [number for number, tensor in enumerate(tensors) if tensor.shape.num_elements()]
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", hlo)
    parameters = re.findall(r"\w+\[[\d,]*\]", layout[1]) if layout else []
    if len(parameters) == len(filled) + captured:
        return []
    return [number for number in filled if _translated(function, _changed(batch, tensors, number))[0] != hlo]


def _changed(batch: Any, tensors: list[Any], number: int) -> Any:
    """The batch with other values in one tensor."""
    tensor = tensors[number]
    other = ~tensor if tensor.dtype.is_bool else tensor + tf.ones_like(tensor)
    return tf.nest.pack_sequence_as(batch, [*tensors[:number], other, *tensors[number + 1 :]], expand_composites=True)


def _recompiled(part: int) -> Obstacle:
    return Obstacle(
        kind="compilation",
        found=f"a shape in the step depends on the values of the batch (its tensor {part}), so that XLA compiles anew "
        "for each batch",
        remedy="Compute that shape in the input pipeline and pad to a fixed one, or leave XLA off.",
    )
