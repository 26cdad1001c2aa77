"""Which dtype policy each layer of a model gets, and a model that computes under those policies for a while."""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.model.outputs import output_layers
from tfopt.precision.policy_names import as_policy, is_16_bit

Policy: TypeAlias = str | keras.DTypePolicy | Mapping[str, str | keras.DTypePolicy]
"""A policy for the whole model, or one for each layer named by path, by name or by a regular expression of paths."""


def resolved(model: keras.Model, policy: Policy) -> dict[keras.Layer, keras.DTypePolicy]:
    """Says which dtype policy each layer of a model gets if `policy` is asked for, and changes nothing.

    The rules are those that `tfopt.precision.apply` states.

    Args:
        model: Built or not. Of a subclassed model the outputs are known once it was called on data.
        policy: A name ("float32", "mixed_bfloat16", "mixed_float16"), a Keras policy or a mapping.

    Returns:
        The policy of every layer that computes in floating point, the model itself included.

    Raises:
        TypeError: A key that is no text, or a policy that is neither a name nor a Keras policy.
        ValueError: An unknown policy, a key that no layer has or that names one of those left alone, a layer that
            several expressions match, or a model without layers.
        tfopt.errors.UnsupportedError: A built layer keeps its weights in another dtype than the policy asks for, a
            layer is quantized, or the layers that make the outputs cannot be found.

    Example:
        >>> {layer.name: policy.name for layer, policy in resolved(model, {"conv": "mixed_bfloat16"}).items()}
        {'small': 'float32', 'conv': 'mixed_bfloat16', 'head': 'float32'}
    """
    paths = layer_paths(model)
    floating = [layer for layer in paths if _computes_in_floating_point(layer)]
    if floating in ([], [model]):
        raise ValueError(
            f"Expected a model with layers that compute in floating point. Received: {model.name!r}, which has none. "
            "Add layers first; a subclassed model must hold its layers as attributes."
        )
    policies, exact = asked_for(model, policy, paths)
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
                asked[layer] = _float32(layer)
    _check_in_place(paths, asked)
    return asked


@contextmanager
def computing(model: keras.Model, policies: Mapping[keras.Layer, keras.DTypePolicy]) -> Iterator[None]:
    """Lets layers compute under other policies for a block of code, and puts back the very objects that were there.

    Weights are not touched. A function takes the policies that are in force when it is traced: trace one of your own
    inside the block. Those that Keras keeps (`model.train_function` …) go on under the policies they were traced with.

    Args:
        model: The model that the layers belong to.
        policies: As `resolved` gives them.

    Example:
        >>> with computing(model, resolved(model, "mixed_float16")):
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
    """Gives each layer its policy where it has another."""
    for layer, policy in policies.items():
        if present(layer) != policy:
            # Past the property, which writes into a DTypePolicyMap that several layers may share.
            layer._dtype_policy = policy


def present(layer: keras.Layer) -> keras.DTypePolicy:
    """The policy that a layer computes under; of a DTypePolicyMap its own entry."""
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path] if layer.path else policy.default_policy
    return policy


def asked_for(
    model: keras.Model, policy: Policy, paths: Mapping[keras.Layer, str]
) -> tuple[dict[keras.Layer, keras.DTypePolicy], set[keras.Layer]]:
    """The policy of each layer before outputs are looked at, and the layers that a path or a name asks for."""
    if not isinstance(policy, Mapping):
        return dict.fromkeys(paths, as_policy(policy)), set()
    if wrong := [key for key in policy if not isinstance(key, str)]:
        raise TypeError(
            f"Expected paths or names of layers, or expressions, as keys. Received: {wrong[0]!r}. Take the name or "
            "path of the layer that is meant."
        )
    # Key by key: a DTypePolicyMap answers with its default for any that it lacks.
    named, exact = _named({key: as_policy(policy[key]) for key in policy}, paths)
    default = policy.default_policy if isinstance(policy, keras.dtype_policies.DTypePolicyMap) else None
    asked: dict[keras.Layer, keras.DTypePolicy] = {}

    def assign(layer: keras.Layer, inherited: keras.DTypePolicy | None) -> None:
        wanted = named.get(layer, inherited)
        asked[layer] = wanted or default or present(layer)
        for inner in layer._flatten_layers(include_self=False, recursive=False):
            if inner not in asked:
                assign(inner, wanted)

    assign(model, None)
    return asked, exact


def _named(
    keys: Mapping[str, keras.DTypePolicy], paths: Mapping[keras.Layer, str]
) -> tuple[dict[keras.Layer, keras.DTypePolicy], set[keras.Layer]]:
    """The policy of each layer that a key names, and those of them that a path or a name asks for."""
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
                        f"Expected one policy for each layer. Received: {before[1]!r} and {key!r}, which both match "
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
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"There are: {', '.join(sorted(names))}."
    return ValueError(
        "Expected keys that are paths or names of layers, or regular expressions that match whole paths. "
        f"Received: {key!r}, which matches no layer. {hint}"
    )


def _computes_in_floating_point(layer: keras.Layer) -> bool:
    if isinstance(layer, (keras.layers.InputLayer, keras.layers.Normalization)):
        return False
    return bool(keras.backend.is_float_dtype(present(layer).compute_dtype))


def _float32(layer: keras.Layer) -> keras.DTypePolicy:
    policy = present(layer)
    return policy if policy.compute_dtype == "float32" else keras.DTypePolicy("float32")


def _check_in_place(paths: Mapping[keras.Layer, str], asked: Mapping[keras.Layer, keras.DTypePolicy]) -> None:
    """Refuses policies that layers with weights cannot take on any more."""
    changing = [(layer, present(layer), wanted) for layer, wanted in asked.items() if present(layer) != wanted]
    quantized = [paths[x] for x, policy, wanted in changing if policy.quantization_mode or wanted.quantization_mode]
    if quantized:
        raise UnsupportedError(
            f"Expected layers that are not quantized. Found: {', '.join(quantized)}. Quantization cannot be taken "
            "back: build the model anew and load its weights. (tfopt.precision.apply gives layers float8 by that name.)"
        )
    unlike = [x for x in changing if x[0].weights and x[1].variable_dtype != x[2].variable_dtype]
    if unlike:
        layer, policy, wanted = unlike[-1]
        instead = "float32, mixed_bfloat16 or mixed_float16" if policy.variable_dtype == "float32" else policy.name
        raise UnsupportedError(
            f"Expected a policy that keeps weights in {policy.variable_dtype}, as {paths[layer]!r} was built with. "
            f"Found: {wanted.name!r}, which keeps them in {wanted.variable_dtype}. Use {instead}, or build the model "
            "anew under that policy and load its weights."
        )
