"""Copies of a model with layers quantized to float8, to measure on: in the model itself that cannot be undone."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice, zip_longest
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.model.state import python_random_kept
from tfopt.precision.float8_margins import scales_and_amax
from tfopt.precision.layer_policies import current_policy, quantize, set_policies
from tfopt.precision.optimizer_swap import scale_loss
from tfopt.repairs import computes_in_float16

# A float8 layer takes its scales from earlier steps: the first has none, the second uses the first one's.
_FLOAT8_STEPS = 3


def quantized_clone(
    model: keras.Model, policies: Mapping[keras.Layer, keras.DTypePolicy], layers: Iterable[keras.Layer]
) -> keras.Model:
    """A copy of a built model to measure on: the same weights, loss and layer names, with an SGD that moves nothing.

    In the copy, `layers` of the model are quantized to float8, and the others have their `policies` or keep their own.
    """
    copies = _copies(model)
    clone: keras.Model = copies[model]
    set_policies({copy: policies.get(layer, current_policy(layer)) for layer, copy in copies.items()})
    quantize(copies[layer] for layer in layers)
    if model.compiled:
        options = model._compile_config.config
        # Keras' own compile, since a custom one may take anything. No metrics: the copy would update the model's.
        keras.Model.compile(clone, keras.optimizers.SGD(0.0), options["loss"], loss_weights=options["loss_weights"])
    return clone


def _copies(model: keras.Model) -> dict[keras.Layer, keras.Layer]:
    """Each layer of a model and its copy of the same name and weights, the model itself first."""
    try:
        with python_random_kept():
            clone = keras.models.clone_model(model)
            if not clone.built:
                clone.build_from_config(model.get_build_config())
            clone.set_weights(model.get_weights())
    except Exception as error:  # whatever the user's class raises
        raise UnsupportedError(
            f"Expected a model that can be copied, to quantize the copy. Found {model.name!r}, whose copy failed: "
            f"{error}. Give its class a get_config that can rebuild it, layers included."
        ) from error
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


def settle_scales(clone: keras.Model, batches: Sequence[Any], layers: int) -> None:
    """Trains a quantized clone until its scales fit; its weights stay. `layers` is how many of them are quantized.

    The last of several batches is kept back: what exceeds the scales there would saturate in training too.
    """
    kept = [variable for variable in clone.variables if not getattr(variable, "overwrite_with_gradient", False)]
    values = [variable.numpy() for variable in kept]
    if computes_in_float16(clone):
        scale_loss(clone)  # since the gradients compared later are scaled too
    clone.optimizer.build(clone.trainable_variables)
    # Keras' own step: a custom one may train anything, and is not what is compared later.
    step = tf.function(partial(keras.Model.train_step, clone), autograph=False)
    seen: list[np.ndarray[Any, Any]] = []
    # A gradient that vanishes at first reaches the layer before in every other step.
    most = max(_FLOAT8_STEPS, len(batches)) + 2 * layers
    for batch in islice(cycle(batches[:-1] or batches), most):
        step(batch)
        seen.append(scales_and_amax(layer_paths(clone)))
        if len(seen) >= max(_FLOAT8_STEPS, len(batches)) and all(map(_alike, seen[-3:-1], seen[-2:])):
            break
    for variable, value in zip(kept, values, strict=True):
        variable.assign(value)


def _alike(before: np.ndarray[Any, Any], now: np.ndarray[Any, Any]) -> bool:
    """Whether none has doubled or halved."""
    return bool(np.all((before <= 2 * now) & (now <= 2 * before)))
