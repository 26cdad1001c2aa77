"""The dtype policy of each layer of a model: what a request assigns, and computing under it for a while."""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.model.outputs import output_layers
from tfopt.precision.policies import as_policy, is_16_bit

Policy: TypeAlias = str | keras.DTypePolicy | Mapping[str, str | keras.DTypePolicy]
"""A policy for the whole model, or a mapping from layers (path, name or regular expression of paths) to policies."""


def resolve_policies(model: keras.Model, policy: Policy) -> dict[keras.Layer, keras.DTypePolicy]:
    """Returns the dtype policy each layer would get from `policy`, by the rules of `tfopt.precision.apply`.

    Nothing changes, and the errors are those of `apply`. Only layers that compute in floating point are listed, the
    model itself included.

    Example:
        >>> {layer.name: policy.name for layer, policy in resolve_policies(model, {"conv": "mixed_bfloat16"}).items()}
        {'small': 'float32', 'conv': 'mixed_bfloat16', 'head': 'float32'}
    """
    paths = layer_paths(model)
    floating = [layer for layer in paths if _computes_in_floating_point(layer)]
    if floating in ([], [model]):
        raise ValueError(
            f"Expected a model with layers that compute in floating point. Received: {model.name!r}, which has none. "
            "Add layers first; a subclassed model must hold its layers as attributes."
        )
    policies, exact = policies_asked_for(model, policy)
    fixed = [paths[layer] for layer in paths if layer in exact and layer not in floating]
    if fixed:
        raise ValueError(
            "Expected paths or names of layers that compute in floating point. Received: a policy for "
            f"{', '.join(fixed)}: an input, or a layer of integers, text or constants. Leave it out."
        )
    asked = {layer: policies[layer] for layer in floating}
    if any(is_16_bit(wanted) and layer is not model and layer not in exact for layer, wanted in asked.items()):
        for layer in output_layers(model):
            if layer in asked and layer not in exact:
                present = current_policy(layer)
                asked[layer] = present if present.compute_dtype == "float32" else keras.DTypePolicy("float32")
    _check_in_place(paths, asked)
    return asked


@contextmanager
def under_policies(model: keras.Model, policies: Mapping[keras.Layer, keras.DTypePolicy]) -> Iterator[None]:
    """Lets layers compute under other policies for a block of code, and restores the previous policy objects.

    Weights are not touched. A function keeps the policies it was traced under: trace a new one inside the block, since
    those Keras holds (`model.train_function` …) are not affected.

    Example:
        >>> with under_policies(model, resolve_policies(model, "mixed_float16")):
        ...     outputs = model(x, training=True)
    """
    before = {layer: layer._dtype_policy for layer in model._flatten_layers()}
    try:
        set_policies(policies)
        yield
    finally:
        for layer, policy in before.items():
            layer._dtype_policy = policy


def set_policies(policies: Mapping[keras.Layer, keras.DTypePolicy]) -> None:
    """Gives each layer its policy, unless it has it already."""
    for layer, policy in policies.items():
        if current_policy(layer) != policy:
            # Not through the property, which would write into a DTypePolicyMap that several layers may share.
            layer._dtype_policy = policy


def current_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """The policy a layer computes under: its own entry if it holds a DTypePolicyMap."""
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path] if layer.path else policy.default_policy
    return policy


def policies_asked_for(
    model: keras.Model, policy: Policy
) -> tuple[dict[keras.Layer, keras.DTypePolicy], set[keras.Layer]]:
    """The policy of each layer before output layers are exempted, and the layers that a path or a name selects."""
    paths = layer_paths(model)
    if not isinstance(policy, Mapping):
        return dict.fromkeys(paths, as_policy(policy)), set()
    if wrong := [key for key in policy if not isinstance(key, str)]:
        raise TypeError(
            f"Expected paths or names of layers, or regular expressions, as keys. Received: {wrong[0]!r}. Use the "
            "layer's name or path."
        )
    # Key by key, since a DTypePolicyMap returns its default for any key it lacks.
    named, exact = _named({key: as_policy(policy[key]) for key in policy}, paths)
    default = policy.default_policy if isinstance(policy, keras.dtype_policies.DTypePolicyMap) else None
    asked: dict[keras.Layer, keras.DTypePolicy] = {}

    def assign(layer: keras.Layer, inherited: keras.DTypePolicy | None) -> None:
        wanted = named.get(layer, inherited)
        asked[layer] = wanted or default or current_policy(layer)
        for inner in layer._flatten_layers(include_self=False, recursive=False):
            if inner not in asked:
                assign(inner, wanted)

    assign(model, None)
    return asked, exact


def _named(
    keys: Mapping[str, keras.DTypePolicy], paths: Mapping[keras.Layer, str]
) -> tuple[dict[keras.Layer, keras.DTypePolicy], set[keras.Layer]]:
    """The policy of each layer that a key matches, and the layers that match by path or name."""
    names = (dict(paths), {x: x.path for x in paths}, {x: x.name for x in paths})
    named: dict[keras.Layer, tuple[int, str]] = {}
    for key in keys:
        for rank, texts in enumerate((*names, paths)):
            is_expression = rank == len(names)
            layers = [x for x, text in texts.items() if (_matches(key, text) if is_expression else key == text)]
            for layer in layers:
                before = named.get(layer)
                if before and before[0] == rank and is_expression:
                    raise ValueError(
                        f"Expected one policy per layer. Received: {before[1]!r} and {key!r}, which both match "
                        f"{paths[layer]!r}. Name that layer by its path, or narrow the expressions."
                    )
                if before is None or rank < before[0]:
                    named[layer] = (rank, key)
            if layers:
                break
        else:
            raise _unmatched(key, {text for texts in names for text in texts.values() if text})
    policies = {layer: keys[key] for layer, (_, key) in named.items()}
    return policies, {layer for layer, (rank, _) in named.items() if rank < len(names)}


def _matches(expression: str, path: str) -> bool:
    try:
        return re.fullmatch(expression, path) is not None
    except re.error:
        return False


def _unmatched(key: str, names: set[str]) -> ValueError:
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"The names are: {', '.join(sorted(names))}."
    return ValueError(
        "Expected keys that are paths or names of layers, or regular expressions that match whole paths. "
        f"Received: {key!r}, which matches no layer. {hint}"
    )


def _computes_in_floating_point(layer: keras.Layer) -> bool:
    if isinstance(layer, (keras.layers.InputLayer, keras.layers.Normalization)):
        return False
    return bool(keras.backend.is_float_dtype(current_policy(layer).compute_dtype))


def _check_in_place(paths: Mapping[keras.Layer, str], asked: Mapping[keras.Layer, keras.DTypePolicy]) -> None:
    """Refuses policies that layers cannot take once they have weights."""
    changing = [(x, before, wanted) for x, wanted in asked.items() if (before := current_policy(x)) != wanted]
    quantized = [paths[x] for x, policy, wanted in changing if policy.quantization_mode or wanted.quantization_mode]
    if quantized:
        raise UnsupportedError(
            f"Expected layers that are not quantized. Found: {', '.join(quantized)}. Quantization cannot be "
            "undone: rebuild the model and load its weights. (For float8, pass that name to tfopt.precision.apply.)"
        )
    mismatched = [x for x in changing if x[0].weights and x[1].variable_dtype != x[2].variable_dtype]
    if mismatched:
        layer, policy, wanted = mismatched[-1]
        instead = "float32, mixed_bfloat16 or mixed_float16" if policy.variable_dtype == "float32" else policy.name
        raise UnsupportedError(
            f"Expected a policy that keeps weights in {policy.variable_dtype}, as {paths[layer]!r} was built with. "
            f"Found: {wanted.name!r}, which keeps them in {wanted.variable_dtype}. Use {instead}, or rebuild the model "
            "under that policy and load its weights."
        )
