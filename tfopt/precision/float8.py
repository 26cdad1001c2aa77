"""Dense and EinsumDense layers that train with 8-bit floating-point matrix products."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.model.outputs import output_layers
from tfopt.precision.layer_policies import Policy, asked_for, present, set_policies
from tfopt.precision.loss_scaling import set_optimizer
from tfopt.precision.policy_names import as_policy, name_of


def split_float8(model: keras.Model, policy: Policy) -> tuple[Policy, list[keras.Layer]]:
    """Takes float8 out of a policy.

    Args:
        model: The model it is for.
        policy: As `tfopt.precision.apply` takes it: "float8", "float8_from_mixed_bfloat16", a mapping with such values,
            or one without float8.

    Returns:
        The policy without float8, and the layers that are to be quantized: those of exactly the classes Dense and
        EinsumDense that train and do not make the model's outputs (unless their path or name asks for it).

    Raises:
        ValueError: No such layer is left, or one is not built.
    """
    if isinstance(policy, Mapping) and not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        sources = {key: _without_float8(value) for key, value in policy.items()}
        base: Policy = {key: source for key, source in sources.items() if source != {}}
        marked = {key: _FLOAT8 if _is_float8(value) else as_policy(value) for key, value in policy.items()}
        asked, exact = asked_for(model, marked, layer_paths(model))
        wanted = {layer for layer, its in asked.items() if its is _FLOAT8}
    else:
        base, exact = _without_float8(policy), set()
        wanted = set(model._flatten_layers()) if _is_float8(policy) else set()
    if not wanted:
        return base, []
    kept = output_layers(model) - exact
    # The scales move with the gradients: a layer that does not train would keep 1.
    layers = [x for x in layer_paths(model) if x in wanted - kept and type(x) in _CLASSES and x.trainable]
    _check(model, layers)
    return base, [layer for layer in layers if present(layer).quantization_mode != "float8"]


def quantize(
    model: keras.Model, layers: Iterable[keras.Layer], optimizer: keras.optimizers.Optimizer | None = None
) -> None:
    """Quantizes built layers to float8; `optimizer`, of `made_anew`, takes the place and state of the model's."""
    for layer in layers:
        layer._dtype_policy = present(layer)  # quantize would write into a DTypePolicyMap that others may share
        layer.quantize("float8")
    if optimizer is not None:
        _take_over(model, optimizer)
        set_optimizer(model, optimizer)


def made_anew(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """An optimizer like the model's, which a built one must give way to where weights are added; None without one.

    Raises:
        tfopt.errors.UnsupportedError: The optimizer's class cannot make it from its config.
    """
    old = model.optimizer if model.compiled else None
    if old is None or not old.built:
        return None
    try:
        with model.distribute_strategy.scope():
            return type(old).from_config(old.get_config())
    except Exception as error:  # whatever the user's class or schedule raises
        raise UnsupportedError(
            "Expected an optimizer that can be made anew from its config, since float8 adds weights. Found "
            f"{type(old).__name__}, where that failed: {error} Register its class, or that of its learning rate "
            "schedule, with keras.saving.register_keras_serializable and give it a get_config; or apply float8 before "
            "the model is compiled."
        ) from error


def quantized_clone(
    model: keras.Model, policies: Mapping[keras.Layer, keras.DTypePolicy], layers: Iterable[keras.Layer]
) -> keras.Model:
    """A copy of a model with the same weights and loss, quantized to float8; its optimizer is a plain SGD.

    For measurement: the model itself stays as it is.

    Args:
        model: Functional or Sequential, or subclassed with a `get_config` that makes it anew; built.
        policies: What layers of the model get in the copy; the others keep their own.
        layers: Those of the model to quantize in the copy, as `split_float8` gives them.

    Returns:
        The copy, with layers of the same names and paths.

    Raises:
        tfopt.errors.UnsupportedError: The model's class cannot make a copy of itself, or makes an unlike one.
    """
    copies = _copies(model)
    clone: keras.Model = copies[model]
    set_policies({copy: policies.get(layer, present(layer)) for layer, copy in copies.items()})
    quantize(clone, [copies[layer] for layer in layers])
    if model.compiled:
        options = model._compile_config.config
        # Keras' own compile: the class's may take anything. The copy would count into the metrics of the model.
        keras.Model.compile(clone, "sgd", options["loss"], loss_weights=options["loss_weights"])
    return clone


def _copies(model: keras.Model) -> dict[keras.Layer, keras.Layer]:
    """Each layer of a model and its copy of the same name and weights, the model itself first."""
    seeds = random.getstate()  # Keras draws those of the copy's initializers there
    try:
        clone = keras.models.clone_model(model)
        if not clone.built:
            clone.build_from_config(model.get_build_config())
        clone.set_weights(model.get_weights())
    except Exception as error:  # whatever the user's class raises
        raise UnsupportedError(
            f"Expected a model that can be copied, to quantize the copy. Found {model.name!r}, whose copy failed: "
            f"{error}. Give its class a get_config that makes it anew, layers included."
        ) from error
    finally:
        random.setstate(seeds)
    # In their order, as set_weights takes them: layers without a name= get another one in each copy.
    pairs = list(zip_longest(layer_paths(model), layer_paths(clone)))
    unlike = next((pair for pair in pairs if not _compute_alike(*pair)), None)
    if unlike:
        had, found = ("nothing" if x is None else type(x).__name__ for x in unlike)
        raise UnsupportedError(
            f"Expected a copy that computes what {model.name!r} does, to quantize it. Found {found} in place of {had}. "
            "Give its class a get_config that makes it anew, layers included; let it extend keras.Model, not "
            "keras.Sequential, of which Keras copies no more than the layers."
        )
    for layer, copy in pairs:
        copy.name = layer.name
    return dict(pairs)


def _compute_alike(one: keras.Layer | None, other: keras.Layer | None) -> bool:
    methods = [[getattr(type(x), name, None) for name in ("call", "compute_loss")] for x in (one, other)]
    return one is not None and other is not None and methods[0] == methods[1]


def _take_over(model: keras.Model, new: keras.optimizers.Optimizer) -> None:
    """Gives a new optimizer the state of the model's, for the model's present weights."""
    old = model.optimizer
    _carry_over(old, new)
    present_ids = {id(variable) for variable in model.trainable_variables}
    # Those frozen since the optimizer was built keep their slots, for when they train again.
    frozen = [variable for variable in old._trainable_variables if id(variable) not in present_ids]
    with model.distribute_strategy.scope():
        new.build([*model.trainable_variables, *frozen])
    values = _by_path(new.variables)
    for key, variable in _by_path(old.variables).items():
        values[key].assign(variable)


def _carry_over(old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer) -> None:
    """What an optimizer was told beside its config."""
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern", "constant_before"):
        if name in vars(old):
            setattr(new, name, vars(old)[name])
    if isinstance(old, keras.optimizers.LossScaleOptimizer):
        _carry_over(old.inner_optimizer, new.inner_optimizer)


def _by_path(variables: Iterable[keras.Variable]) -> dict[tuple[str, int], keras.Variable]:
    """Variables by path and, among those of the same path, by number."""
    seen: Counter[str] = Counter()
    found = {}
    for variable in variables:
        found[variable.path, seen[variable.path]] = variable
        seen[variable.path] += 1
    return found


def _check(model: keras.Model, layers: list[keras.Layer]) -> None:
    paths = layer_paths(model)
    if not layers:
        raise ValueError(
            "Expected Dense or EinsumDense layers to quantize to float8 that train and do not make the outputs. "
            f"Received: {model.name!r}, where there is none. Use mixed_bfloat16, or name the layers to quantize."
        )
    unbuilt = [paths[layer] for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            f"Expected built layers to quantize. Received: {model.name!r} with {', '.join(unbuilt)} not built. Call "
            "the model on a batch first."
        )


_CLASSES = (keras.layers.Dense, keras.layers.EinsumDense)
_FLOAT8 = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32")


def _is_float8(policy: object) -> bool:
    return name_of(policy).split("_from_")[0] == "float8"


def _without_float8(policy: Any) -> Any:
    """What a policy is without float8; {}, which leaves layers as they are, for "float8" alone."""
    if not _is_float8(policy):
        return policy
    _, given, source = name_of(policy).partition("_from_")
    return source if given else {}
