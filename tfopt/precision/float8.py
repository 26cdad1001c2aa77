"""float8: quantizing Dense and EinsumDense layers to train with 8-bit matrix products, in place or in a clone."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.model.outputs import output_layers
from tfopt.precision.layer_policies import Policy, current_policy, policies_asked_for, set_policies
from tfopt.precision.loss_scale_wrapper import set_optimizer
from tfopt.precision.policies import as_policy, name_of

_CLASSES = (keras.layers.Dense, keras.layers.EinsumDense)
_FLOAT8 = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32")


def split_float8(model: keras.Model, policy: Policy) -> tuple[Policy, list[keras.Layer]]:
    """Splits a policy, as `tfopt.precision.apply` takes it, into one without float8 and the layers to quantize.

    Those are the layers of exactly the classes Dense and EinsumDense that train and do not make the model's outputs,
    unless their path or name selects them.
    """
    if isinstance(policy, Mapping) and not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        sources = {key: _without_float8(value) for key, value in policy.items()}
        base: Policy = {key: source for key, source in sources.items() if source != {}}
        marked = {key: _FLOAT8 if _is_float8(value) else as_policy(value) for key, value in policy.items()}
        asked, exact = policies_asked_for(model, marked)
        wanted = {layer for layer, its in asked.items() if its is _FLOAT8}
    else:
        base, exact = _without_float8(policy), set()
        wanted = set(model._flatten_layers()) if _is_float8(policy) else set()
    if not wanted:
        return base, []
    kept = output_layers(model) - exact
    # Scales move with the gradients; those of a frozen layer would stay 1.
    paths = layer_paths(model)
    layers = [x for x in paths if x in wanted - kept and type(x) in _CLASSES and x.trainable]
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
    return base, [layer for layer in layers if current_policy(layer).quantization_mode != "float8"]


def quantize(
    model: keras.Model, layers: Iterable[keras.Layer], optimizer: keras.optimizers.Optimizer | None = None
) -> None:
    """Quantizes built layers to float8; `optimizer`, from `rebuilt_optimizer`, takes over from the model's."""
    for layer in layers:
        layer._dtype_policy = current_policy(layer)  # quantize would write into a shared DTypePolicyMap
        layer.quantize("float8")
    if optimizer is not None:
        _take_over(model, optimizer)
        set_optimizer(model, optimizer)


def rebuilt_optimizer(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """A new optimizer like the model's, since a built one takes no more weights; None if the model's is not built."""
    old = model.optimizer if model.compiled else None
    if old is None or not old.built:
        return None
    try:
        with model.distribute_strategy.scope():
            return type(old).from_config(old.get_config())
    except Exception as error:  # whatever the user's class or schedule raises
        raise UnsupportedError(
            "Expected an optimizer that can be rebuilt from its config, since float8 adds weights. Found "
            f"{type(old).__name__}, which failed: {error} Register its class, or that of its learning rate schedule, "
            "with keras.saving.register_keras_serializable and give it a get_config; or apply float8 before compiling "
            "the model."
        ) from error


def quantized_clone(
    model: keras.Model, policies: Mapping[keras.Layer, keras.DTypePolicy], layers: Iterable[keras.Layer]
) -> keras.Model:
    """A copy of a built model to measure on: the same weights, loss and layer names, with plain SGD.

    In the copy, `layers` of the model are quantized to float8, and the others have their `policies` or keep their own.
    """
    copies = _copies(model)
    clone: keras.Model = copies[model]
    set_policies({copy: policies.get(layer, current_policy(layer)) for layer, copy in copies.items()})
    quantize(clone, [copies[layer] for layer in layers])
    if model.compiled:
        options = model._compile_config.config
        # Keras' own compile, since a custom one may take anything. No metrics: the copy would update the model's.
        keras.Model.compile(clone, "sgd", options["loss"], loss_weights=options["loss_weights"])
    return clone


def _copies(model: keras.Model) -> dict[keras.Layer, keras.Layer]:
    """Each layer of a model and its copy of the same name and weights, the model itself first."""
    seeds = random.getstate()  # Keras draws the seeds of the copy's initializers from it
    try:
        clone = keras.models.clone_model(model)
        if not clone.built:
            clone.build_from_config(model.get_build_config())
        clone.set_weights(model.get_weights())
    except Exception as error:  # whatever the user's class raises
        raise UnsupportedError(
            f"Expected a model that can be copied, to quantize the copy. Found {model.name!r}, whose copy failed: "
            f"{error}. Give its class a get_config that can rebuild it, layers included."
        ) from error
    finally:
        random.setstate(seeds)
    # In order, as for set_weights: a layer without a name= gets another name in each copy.
    pairs = list(zip_longest(layer_paths(model), layer_paths(clone)))
    mismatch = next((pair for pair in pairs if not _compute_alike(*pair)), None)
    if mismatch:
        had, found = ("nothing" if x is None else type(x).__name__ for x in mismatch)
        raise UnsupportedError(
            f"Expected a copy that computes what {model.name!r} does, to quantize it. Found {found} in place of {had}. "
            "Give its class a get_config that can rebuild it, layers included; extend keras.Model rather than "
            "keras.Sequential, of which Keras copies only the layers."
        )
    for layer, copy in pairs:
        copy.name = layer.name
    return dict(pairs)


def _compute_alike(one: keras.Layer | None, other: keras.Layer | None) -> bool:
    methods = [[getattr(type(x), name, None) for name in ("call", "compute_loss")] for x in (one, other)]
    return one is not None and other is not None and methods[0] == methods[1]


def _take_over(model: keras.Model, new: keras.optimizers.Optimizer) -> None:
    """Copies the state of the model's optimizer to a new one, for the model's present weights."""
    old = model.optimizer
    _carry_over(old, new)
    present_ids = {id(variable) for variable in model.trainable_variables}
    # Weights frozen since the optimizer was built keep their slots, in case they train again.
    frozen = [variable for variable in old._trainable_variables if id(variable) not in present_ids]
    with model.distribute_strategy.scope():
        new.build([*model.trainable_variables, *frozen])
    values = _by_path(new.variables)
    for key, variable in _by_path(old.variables).items():
        values[key].assign(variable)


def _carry_over(old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer) -> None:
    """Copies the settings of an optimizer that its config lacks."""
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern", "constant_before"):
        if name in vars(old):
            setattr(new, name, vars(old)[name])
    if isinstance(old, keras.optimizers.LossScaleOptimizer):
        _carry_over(old.inner_optimizer, new.inner_optimizer)


def _by_path(variables: Iterable[keras.Variable]) -> dict[tuple[str, int], keras.Variable]:
    """Variables by path, numbered where paths repeat."""
    seen: Counter[str] = Counter()
    found = {}
    for variable in variables:
        found[variable.path, seen[variable.path]] = variable
        seen[variable.path] += 1
    return found


def _is_float8(policy: object) -> bool:
    return name_of(policy).split("_from_")[0] == "float8"


def _without_float8(policy: Any) -> Any:
    """A policy without its float8; for plain "float8" {}, which leaves layers as they are."""
    if not _is_float8(policy):
        return policy
    _, given, source = name_of(policy).partition("_from_")
    return source if given else {}
