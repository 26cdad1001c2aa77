"""The dtype policy of each layer of a model: what a request assigns, and computing under it for a while."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfopt import repairs
from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths, output_layers
from tfopt.precision.policies import as_policy, named

Policy: TypeAlias = str | keras.DTypePolicy | Mapping[str, str | keras.DTypePolicy]
"""A policy for the whole model, or a mapping from layers (path, name or regular expression of paths) to policies."""

_Assigned: TypeAlias = dict[keras.Layer, keras.DTypePolicy]
_FLOAT8 = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32")
# Of a Normalization layer.
_CONSTANTS = ("mean", "variance")
_QUANTIZABLE = (keras.layers.Dense, keras.layers.EinsumDense)


class Assignment(NamedTuple):
    """What a policy means for the layers of a model."""

    description: str
    """The policy in words."""
    paths: dict[keras.Layer, str]
    """Of all layers."""
    policies: dict[keras.Layer, keras.DTypePolicy]
    """Of the layers that compute in floating point, the model itself included."""
    quantized: list[keras.Layer]
    """Layers to quantize to float8 besides, unless they are already."""
    in_16_bits_today: dict[keras.Layer, keras.DTypePolicy]
    """What `policies` puts into float32 by itself: 16-bit output layers, with the policy they would get otherwise, and
    inputs and Normalization of 16 bits, which round the batch."""


def assign_policies(model: keras.Model, policy: Policy) -> Assignment:
    """Returns the dtype policy each layer would get from `policy`, by the rules of `tfopt.precision.apply`.

    Nothing changes, and the errors are those of `apply`.
    """
    policy = named(policy)
    base, quantized = _split_float8(model, policy)
    description = _described(policy)
    paths = layer_paths(model)
    if isinstance(base, Mapping):
        asked, exact = _asked_by_key(model, base, paths)
    else:
        asked, exact = dict.fromkeys(paths, as_policy(base)), set()
    floating = [layer for layer in paths if _computes_in_floating_point(layer)]
    if all(layer is model or _rounds_inputs(layer) for layer in floating):
        raise ValueError(
            f"Expected a model with layers that compute in floating point. Received: {model.name!r}, which has none. "
            "Add layers first; a subclassed model must hold its layers as attributes."
        )
    fixed = [paths[layer] for layer in paths if layer in exact and layer not in floating]
    if fixed:
        raise ValueError(
            "Expected paths or names of layers that compute in floating point. Received: a policy for "
            f"{', '.join(fixed)}: an input, or a layer of integers, text or constants. Leave it out."
        )
    policies = {layer: asked[layer] for layer in floating}
    heads = {}
    if any(is_16_bit(wanted) and layer is not model and layer not in exact for layer, wanted in policies.items()):
        outputs = output_layers(model)
        for layer in (outputs | _also_using(outputs, model)).intersection(policies) - exact:
            present = current_policy(layer)
            policies[layer] = present if present.compute_dtype == "float32" else keras.DTypePolicy("float32")
            if layer not in outputs:
                continue
            if is_16_bit(present) and asked[layer].compute_dtype != "float32":
                heads[layer] = asked[layer]
    for layer in filter(_rounds_inputs, floating):
        if layer in exact:
            is_input = isinstance(layer, keras.layers.InputLayer)
            policies[layer] = keras.DTypePolicy(asked[layer].compute_dtype) if is_input else asked[layer]
        else:
            policies[layer], heads[layer] = keras.DTypePolicy("float32"), current_policy(layer)
    _check_in_place(paths, policies)
    return Assignment(description, paths, policies, quantized, heads)


def _also_using(outputs: frozenset[keras.Layer], model: keras.Model) -> set[keras.Layer]:
    """Layers that hold a layer which makes outputs elsewhere, with all layers inside them.

    Such as an embedding of tokens and positions whose tokens' table makes the logits, too: its own code may add what
    its parts return, so they need one dtype.
    """
    found: set[keras.Layer] = set()
    for holder in model._flatten_layers(include_self=False):
        if isinstance(holder, keras.Model) or holder in outputs:
            continue
        shared = outputs.intersection(holder._flatten_layers(include_self=False, recursive=False))
        if shared and not shared.isdisjoint(_reached(model, holder)):
            found.update(holder._flatten_layers())
    return found


def _reached(model: keras.Model, without: keras.Layer) -> set[keras.Layer]:
    """The layers of a model that are also held by others than one of them."""
    found: set[keras.Layer] = set()
    waiting: list[keras.Layer] = [model]
    while waiting:
        inner = waiting.pop()._flatten_layers(include_self=False, recursive=False)
        new = {layer for layer in inner if layer is not without} - found
        found |= new
        waiting += new
    return found


def is_16_bit(policy: keras.DTypePolicy) -> bool:
    """Whether layers under a policy output 16 bits."""
    return policy.compute_dtype in ("float16", "bfloat16")


def name_of(policy: Any) -> str:
    """The name of a policy; anything else as a string."""
    return policy.name if isinstance(policy, keras.DTypePolicy) else str(policy)


def _described(policy: Policy) -> str:
    if not isinstance(policy, Mapping):
        return name_of(policy)
    names = sorted({name_of(policy[key]) for key in policy})
    return f"a policy per layer ({', '.join(names)})" if names else "the model as it stands"


def _split_float8(model: keras.Model, policy: Policy) -> tuple[Policy, list[keras.Layer]]:
    """Splits a policy into one without float8 and the layers to quantize.

    Those are the layers of exactly the classes Dense and EinsumDense that train and do not make the model's outputs,
    unless their path or name selects them.
    """
    exact: set[keras.Layer] = set()
    if not isinstance(policy, Mapping) or isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        if not _is_float8(policy):
            return policy, []
        base = _without_float8(policy)
        wanted = set(model._flatten_layers())
    else:
        if not any(_is_float8(value) for value in policy.values()):
            return policy, []
        sources = {key: _without_float8(value) if _is_float8(value) else value for key, value in policy.items()}
        base = {key: source for key, source in sources.items() if source != {}}
        marked = {key: _FLOAT8 if _is_float8(value) else value for key, value in policy.items()}
        asked, exact = _asked_by_key(model, marked, layer_paths(model))
        wanted = {layer for layer, its in asked.items() if its is _FLOAT8}
    if not wanted:
        return base, []
    kept = output_layers(model) - exact
    # Scales move with the gradients; those of a frozen layer would stay 1.
    paths = layer_paths(model)
    layers = [x for x in paths if x in wanted - kept and type(x) in _QUANTIZABLE and x.trainable]
    if not layers:
        raise ValueError(
            "Expected Dense or EinsumDense layers to quantize to float8 that train and do not make the outputs. "
            f"Received: {model.name!r}, which has none. Use mixed_bfloat16, or name the layers to quantize."
        )
    unbuilt = [paths[layer] for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            f"Expected built layers to quantize. Received: {model.name!r}, with layers not built: "
            f"{', '.join(unbuilt)}. Call the model on a batch first."
        )
    quantized = [layer for layer in layers if current_policy(layer).quantization_mode != "float8"]
    if adapted := [paths[layer] for layer in quantized if layer.lora_enabled]:
        raise UnsupportedError(
            f"Expected layers without LoRA to quantize to float8, which Keras cannot compute with it. Found: "
            f"{', '.join(adapted)}. Name the layers to quantize instead, or use mixed_bfloat16."
        )
    return base, quantized


def _is_float8(policy: object) -> bool:
    return name_of(policy).split("_from_")[0] == "float8"


def _without_float8(policy: Any) -> Any:
    """The policy that "float8_from_…" names; for plain "float8" {}, which leaves layers as they are."""
    _, given, source = name_of(policy).partition("_from_")
    return source if given else {}


@contextmanager
def under_policies(model: keras.Model, policies: Mapping[keras.Layer, keras.DTypePolicy]) -> Iterator[None]:
    """Lets layers compute under other policies for a block of code, and restores the previous policy objects.

    Weights are not touched. A function keeps the policies it was traced under: trace a new one inside the block, since
    those Keras holds (`model.train_function` …) are not affected.
    """
    layers = model._flatten_layers()
    before = {layer: layer._dtype_policy for layer in layers}
    inputs = {layer: current_policy(layer) for layer in layers if _rounds_inputs(layer)}
    constants = {layer: {name: vars(layer)[name] for name in _CONSTANTS if name in vars(layer)} for layer in inputs}
    try:
        set_policies(policies)
        yield
    finally:
        for layer, policy in before.items():
            layer._dtype_policy = policy
        for layer, policy in inputs.items():
            if isinstance(layer, keras.layers.InputLayer):
                repairs.set_input_dtype(layer, policy.compute_dtype)
            vars(layer).update(constants[layer])


def set_policies(policies: Mapping[keras.Layer, keras.DTypePolicy]) -> None:
    """Gives each layer its policy, unless it has it already."""
    for layer, policy in policies.items():
        if current_policy(layer) == policy:
            continue
        if isinstance(layer, keras.layers.InputLayer):
            repairs.set_input_dtype(layer, policy.compute_dtype)
        else:
            # Not through the property, which would write into a DTypePolicyMap that several layers may share.
            layer._dtype_policy = policy
            if isinstance(layer, keras.layers.Normalization) and layer.built:
                _make_constants(layer)


def quantize(layers: Iterable[keras.Layer]) -> None:
    """Quantizes built layers to float8."""
    for layer in layers:
        layer._dtype_policy = current_policy(layer)  # quantize would write into a shared DTypePolicyMap
        layer.quantize("float8")


def current_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """The policy a layer computes under: its own entry if it holds a DTypePolicyMap; of a 16-bit input, its dtype."""
    if _is_16_bit_input(layer):
        return keras.DTypePolicy(layer.dtype)
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path] if layer.path else policy.default_policy
    return policy


def _asked_by_key(
    model: keras.Model, policy: Mapping[str, str | keras.DTypePolicy], paths: Mapping[keras.Layer, str]
) -> tuple[_Assigned, set[keras.Layer]]:
    """The policy of each layer before output layers are exempted, and the layers that a path or a name selects."""
    if wrong := [key for key in policy if not isinstance(key, str)]:
        raise TypeError(
            f"Expected paths or names of layers, or regular expressions, as keys. Received: {wrong[0]!r}. Use the "
            "layer's name or path."
        )
    # Key by key, since a DTypePolicyMap returns its default for any key it lacks.
    chosen, exact = _named({key: as_policy(policy[key]) for key in policy}, paths)
    default = policy.default_policy if isinstance(policy, keras.dtype_policies.DTypePolicyMap) else None
    asked: _Assigned = {}

    def assign(layer: keras.Layer, inherited: keras.DTypePolicy | None) -> None:
        wanted = chosen.get(layer, inherited)
        asked[layer] = wanted or default or current_policy(layer)
        for inner in layer._flatten_layers(include_self=False, recursive=False):
            if inner not in asked:
                assign(inner, wanted)

    assign(model, None)
    return asked, exact


def _named(
    keys: Mapping[str, keras.DTypePolicy], paths: Mapping[keras.Layer, str]
) -> tuple[_Assigned, set[keras.Layer]]:
    """The policy of each layer that a key matches, and the layers that match by path or name."""
    names = (dict(paths), {x: x.path for x in paths}, {x: x.name for x in paths})
    found: dict[keras.Layer, tuple[int, str]] = {}
    for key in keys:
        for rank, texts in enumerate((*names, paths)):
            is_expression = rank == len(names)
            layers = [x for x, text in texts.items() if (_matches(key, text) if is_expression else key == text)]
            for layer in layers:
                before = found.get(layer)
                if before and before[0] == rank and is_expression:
                    raise ValueError(
                        f"Expected one policy per layer. Received: {before[1]!r} and {key!r}, which both match "
                        f"{paths[layer]!r}. Name that layer by its path, or narrow the expressions."
                    )
                if before is None or rank < before[0]:
                    found[layer] = (rank, key)
            if layers:
                break
        else:
            raise _unmatched(key, {text for texts in names for text in texts.values() if text})
    policies = {layer: keys[key] for layer, (_, key) in found.items()}
    return policies, {layer for layer, (rank, _) in found.items() if rank < len(names)}


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
        return _rounds_inputs(layer)
    return bool(keras.backend.is_float_dtype(current_policy(layer).compute_dtype))


def _rounds_inputs(layer: keras.Layer) -> bool:
    """Whether a layer that stays in float32 otherwise was made in 16 bits."""
    if isinstance(layer, keras.layers.Normalization):
        return is_16_bit(current_policy(layer))
    return _is_16_bit_input(layer)


def _is_16_bit_input(layer: keras.Layer) -> bool:
    """By its dtype: its policy is the global one of its creation, and says nothing."""
    return isinstance(layer, keras.layers.InputLayer) and layer.dtype in ("float16", "bfloat16")


def _make_constants(layer: keras.layers.Normalization) -> None:
    """Makes mean and variance again in the dtype that the layer computes in."""
    with tf.init_scope():
        if layer.input_mean is None:
            layer.finalize_state()
        else:
            keras.layers.Normalization.build(layer, layer._build_input_shape)


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
