"""Finds which functions of `augment` XLA can compile for the device stage."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.shared.elements import accepts_seed, apply_stage, element_of
from tfopt.pipelines.shared.layers import LayerFunction
from tfopt.pipelines.shared.options import PipelineOptions, unmarked


def find_obstacles(options: PipelineOptions, spec: Any) -> tuple[str | None, ...]:
    """Returns, for each function of `augment`, why XLA cannot compile it; None where it can.

    Layers that say so are believed (`supports_jit`). All others are lowered, which takes a fraction of a second: some
    that claim to be compilable are not, such as RandAugment and MixUp.

    Args:
        options: The pipeline's options; the functions take batches.
        spec: The element spec of a full batch before `augment`.

    Example:
        >>> from tfopt.pipelines.shared.options import per_batch
        >>> options = PipelineOptions(augment=[per_batch(tf.abs), per_batch(tf.io.encode_base64)])
        >>> find_obstacles(options, tf.TensorSpec((4, 2)))[0] is None
        True
    """
    found = []
    for function in map(unmarked, options.augmentations):
        obstacle, spec = _obstacle(function, spec)
        found.append(obstacle)
    return tuple(found)


def _obstacle(function: Callable[..., Any], spec: Any) -> tuple[str | None, Any]:
    """Returns the obstacle, and the element spec behind the function."""
    takes_seed = accepts_seed(function)

    def called(*parts: Any, seed: Any) -> Any:
        return apply_stage("augment", function, element_of(parts, spec), **({"seed": seed} if takes_seed else {}))

    arguments = spec if type(spec) is tuple else (spec,)
    seed = tf.TensorSpec((2,), tf.int32)
    behind = tf.function(called).get_concrete_function(*arguments, seed=seed).structured_outputs
    behind = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), behind)
    if isinstance(function, LayerFunction) and not _claims_jit(function.layer):
        return "supports_jit is False", behind
    lowered = tf.function(called, jit_compile=True)
    return _lowering_error(partial(lowered.experimental_get_compiler_ir, *arguments, seed=seed)), behind


def _claims_jit(layer: Any) -> bool:
    return all(getattr(inner, "supports_jit", True) for inner in layer._flatten_layers())


def _lowering_error(lower: Callable[[], Any]) -> str | None:
    try:
        lower()(stage="hlo")
    except (ValueError, tf.errors.OpError) as error:
        operation = re.search(r"No registered '(\w+)'", str(error))
        return f"XLA has no {operation[1]}" if operation else "XLA cannot compile it"
    return None
