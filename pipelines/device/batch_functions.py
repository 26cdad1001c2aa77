"""Makes batches from rows on the device: gathered by index, augmented and padded in functions of their own.

XLA compiles the gather, before and apart from the training step. ResNet-50 on an H200: 37.95 ms per step, of which the
gather takes 0.36 ms; 40.4 ms with the gather in the step's own function; 67 to 69 ms with TensorFlow's kernels, which
take uint8 through the host.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.shared.elements import accepts_seed, apply_stage, element_of, leaves, without_autograph
from tfopt.pipelines.shared.functions import StageFunction, augment_functions, call_in_turn, pad_batch
from tfopt.pipelines.shared.layer_function import LayerFunction
from tfopt.pipelines.shared.options import PipelineOptions, unmarked


def batch_functions(options: PipelineOptions, obstacles: Sequence[str | None], spec: Any) -> tuple[Any, ...]:
    """Returns the `tf.function`s that make a batch, to be called in turn.

    The first takes `(rows, indices, bits)`: the leaves of all examples in `stored_dtype`, int64 indices of shape
    (batch,), and random bits for the seeds, or None. Each further one takes `(batch, bits)`. Neighbours that XLA
    compiles are fused.

    Args:
        options: The pipeline's options.
        obstacles: For each function of `augment`, why XLA cannot compile it; None if it can.
        spec: The element spec of a row.
    """
    functions = augment_functions(options, by_batch=True)
    jits = [obstacle is None for obstacle in obstacles] or [True] * len(functions)
    if options.remainder == "pad":
        functions, jits = [*functions, StageFunction("pad", _padding(options.batch_size))], [*jits, True]
    groups = [
        (jit, [function for _, function in group])
        for jit, group in itertools.groupby(zip(jits, functions, strict=True), key=lambda pair: pair[0])
    ]
    first = groups.pop(0)[1] if groups and groups[0][0] else []
    made, number = [_gathering(first, spec)], sum(function.seeded for function in first)
    for jit, group in groups:
        made.append(_passing(group, number, jit=jit))
        number += sum(function.seeded for function in group)
    return tuple(made)


def stored_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a leaf is stored on the device."""
    # Eager int32 tensors stay in host memory whatever the device, and would be copied for each batch.
    return tf.uint32 if dtype == tf.int32 else dtype


def find_obstacles(options: PipelineOptions, spec: Any) -> tuple[str | None, ...]:
    """Returns, for each function of `augment`, why XLA cannot compile it; None if it can.

    A layer whose `supports_jit` is False is believed. Everything else is lowered, which takes a fraction of a second:
    some layers that claim to compile do not, such as RandAugment and MixUp.

    Args:
        options: The pipeline's options; the functions take batches.
        spec: The element spec of a full batch before `augment`.

    Example:
        >>> from tfopt.pipelines import per_batch
        >>> options = PipelineOptions(augment=[per_batch(tf.abs), per_batch(tf.io.encode_base64)])
        >>> find_obstacles(options, tf.TensorSpec((4, 2)))[0] is None
        True
    """
    found = []
    for function in map(unmarked, options.augmentations):
        obstacle, spec = _obstacle(function, spec)
        found.append(obstacle)
    return tuple(found)


def _gathering(functions: Sequence[StageFunction], spec: Any) -> Any:
    dtypes = [leaf.dtype for leaf in leaves(spec)]

    @without_autograph
    def gathered(rows: Sequence[Any], indices: Any) -> Any:
        chosen = [tf.gather(leaf, indices) for leaf in rows]
        restored = [
            leaf if leaf.dtype == dtype else tf.bitcast(leaf, dtype) for leaf, dtype in zip(chosen, dtypes, strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, restored)

    def gather(rows: Sequence[Any], indices: Any, bits: Any) -> Any:
        return call_in_turn(functions, gathered(rows, indices), bits)

    return tf.function(gather, jit_compile=True)


def _passing(functions: Sequence[StageFunction], number: int, *, jit: bool) -> Any:
    def pass_on(batch: Any, bits: Any) -> Any:
        return call_in_turn(functions, batch, bits, number)

    return tf.function(pass_on, jit_compile=jit)


def _padding(batch_size: int) -> Callable[..., Any]:
    @without_autograph
    def padded(*batch: Any) -> Any:
        return pad_batch(batch, batch_size)

    return padded


def _obstacle(function: Callable[..., Any], spec: Any) -> tuple[str | None, Any]:
    """Returns the obstacle, and the element spec after the function."""
    takes_seed = accepts_seed(function)

    def called(*parts: Any, seed: Any) -> Any:
        return apply_stage("augment", function, element_of(parts, spec), **({"seed": seed} if takes_seed else {}))

    arguments = spec if type(spec) is tuple else (spec,)
    seed = tf.TensorSpec((2,), tf.int32)
    after = tf.function(called).get_concrete_function(*arguments, seed=seed).structured_outputs
    after = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), after)
    if isinstance(function, LayerFunction) and not _claims_jit(function.layer):
        return "supports_jit is False", after
    lowered = tf.function(called, jit_compile=True)
    return _lowering_error(partial(lowered.experimental_get_compiler_ir, *arguments, seed=seed)), after


def _claims_jit(layer: Any) -> bool:
    return all(getattr(inner, "supports_jit", True) for inner in layer._flatten_layers())


def _lowering_error(lower: Callable[[], Any]) -> str | None:
    try:
        lower()(stage="hlo")
    except (ValueError, tf.errors.OpError) as error:
        operation = re.search(r"No registered '(\w+)'", str(error))
        return f"XLA has no {operation[1]}" if operation else "XLA cannot compile it"
    return None
