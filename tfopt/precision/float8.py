"""float8: quantizing Dense and EinsumDense layers to train with 8-bit matrix products, in place or in a clone."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.precision.layer_policies import current_policy, set_policies
from tfopt.precision.loss_scale_wrapper import set_optimizer


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
