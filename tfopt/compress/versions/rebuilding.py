"""A model built a second time: with all of its weights, or with what is kept of them."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import TfoptError, UnsupportedError, summarize_error
from tfopt.internals.layers import Functional, SafeModeScope, is_made_of_graph
from tfopt.model.products import graph_nodes
from tfopt.model.state import layers_in_float32, python_random_kept

_OVERRIDES = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "compile", "fit")
_SAME = 0.01  # of the outputs' norm: TF32 leaves 0.001, a wrong channel far more


Configs = Mapping[keras.Layer, Mapping[str, Any]]
Kept = Mapping[tuple[int, int], Any]
"""By the id of a weight and an axis: which indices along it are kept."""


def rebuilt(model: keras.Model, configs: Configs | None = None, kept: Kept | None = None) -> keras.Model:
    """Builds and compiles a model again, perhaps a smaller one; its optimizer is fresh.

    Args:
        model: Built and compiled; it is not changed.
        configs: Changes to the configs of layers.
        kept: The indices of weights to keep. Default: all.

    Raises:
        tfopt.errors.UnsupportedError: If a part of it cannot be built again.
    """
    with python_random_kept():
        clones = _Clones(configs or {})
        new = clones(model)
        if not new.built:  # it is subclassed
            new.build_from_config(model.get_build_config())
            new.built = True  # which Keras leaves to the first call
        clones.copy_weights(kept or {})
    for layer, copy in zip(model._flatten_layers(), new._flatten_layers(), strict=True):
        copy._dtype_policy = layer._dtype_policy
        if copy.trainable != layer.trainable:  # from the top down, since a model sets those of its layers
            copy.trainable = layer.trainable
    for weight, copied in zip(model.weights, new.weights, strict=True):
        if copied.trainable != weight.trainable:  # frozen one by one
            copied.trainable = weight.trainable
    _compile(model, new)
    return new


def require_same(model: keras.Model, other: keras.Model, batch: Any, what: str) -> None:
    """Raises an UnsupportedError if two models compute different outputs; `what` names the second one.

    Raises:
        tfopt.errors.UnsupportedError: If they do, or the other one computes with the model's own weights.
        tfopt.errors.TfoptError: If they cannot be compared, since no number in an output is finite.
    """
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    _require_apart(model, other, x)
    outputs = []
    for one in (model, other):
        with layers_in_float32(one), keras.StatelessScope():  # in which no layer's seeds or state move
            outputs.append([np.asarray(part, "float64") for part in keras.tree.flatten(one(x, training=False))])
    for a, b in zip(*outputs, strict=True):
        known = np.isfinite(a)
        if a.size and not known.any():
            raise TfoptError(
                f"Expected finite outputs, by which {what} is checked. Found: {model.name!r} computes only NaN or "
                "infinity on the first batch. Check the data and the weights."
            )
        off, size = np.linalg.norm(a[known] - b[known]), np.linalg.norm(a[known])
        if not off <= _SAME * size:
            raise UnsupportedError(
                f"Expected {what} to compute what it should. Found: an output of {model.name!r} of norm {size:.2g} is "
                f"off by {off:.2g}. The cause may be a "
                "layer whose get_config omits an argument, or which draws random numbers in inference. Correct it, or "
                "leave it out of the model."
            )


def _require_apart(model: keras.Model, other: keras.Model, x: Any) -> None:
    """Raises an UnsupportedError if a model computes with another's weights, as through a Lambda that refers to one."""
    own = {id(weight.value): weight.path for weight in model.variables}
    graph = tf.function(lambda x: other(x, training=False), autograph=False).get_concrete_function(x).graph
    used = [own[id(variable)] for variable in graph.variables if id(variable) in own]
    if used:
        raise UnsupportedError(
            f"Expected weights that layers use of their own. Found {used[0]!r} of {model.name!r}, which a Lambda, an "
            "activation or another layer uses too, and which a second model would share. Make it a layer whose call "
            "takes the values, or that has a get_config with all that its __init__ takes."
        )


def runs_its_graph(layer: Any) -> bool:
    """Whether a model computes its graph and nothing else."""
    return type(layer).call in (Functional.call, keras.Sequential.call)


class _Clones:
    """Clones each layer once, with changes to its config."""

    def __init__(self, configs: Configs):
        self._configs = configs
        self._models: dict[keras.Model, keras.Model] = {}
        self._leaves: dict[keras.Layer, keras.Layer] = {}

    def __call__(self, operation: Any) -> Any:
        if not isinstance(operation, keras.Layer):
            return operation  # of keras.ops, without state
        if graph_nodes(operation) and runs_its_graph(operation):
            if operation not in self._models:
                self._models[operation] = self._model(operation)
            return self._models[operation]
        if operation not in self._leaves:
            self._leaves[operation] = self._leaf(operation)
        return self._leaves[operation]

    def copy_weights(self, kept: Kept) -> None:
        """Gives the clones their layers' values, of those indices along an axis that are kept."""
        copies: dict[int, tuple[Any, keras.Layer]] = {}
        for layer, clone in self._leaves.items():
            if [len(v.shape) for v in layer.variables] != [len(v.shape) for v in clone.variables]:
                raise _cannot(layer, "its clone has other weights")
            if len(list(layer._flatten_layers())) != len(list(clone._flatten_layers())):
                raise _cannot(layer, "its clone has other layers inside")
            for weight, copy in zip(layer.variables, clone.variables, strict=True):
                same, owner = copies.setdefault(id(weight), (copy, layer))
                if same is not copy:
                    raise UnsupportedError(
                        f"Expected layers with weights of their own. Found {owner.name!r} and {layer.name!r}, which "
                        f"share {weight.path!r} and would not once they are built again. Call one layer twice instead; "
                        "keras.layers.ReversibleEmbedding embeds and makes logits with the same weights."
                    )
                value = np.asarray(weight)
                for axis in range(value.ndim):
                    if (id(weight), axis) in kept:
                        value = np.compress(kept[id(weight), axis], value, axis)
                if value.shape != tuple(copy.shape):
                    raise _cannot(layer, f"its clone has {weight.name!r} of shape {tuple(copy.shape)}")
                copy.assign(value)
            if isinstance(clone, keras.layers.Normalization):
                clone.finalize_state()

    def _model(self, model: Any) -> keras.Model:
        overridden = [name for name in _OVERRIDES if _of_the_user(getattr(type(model), name))]
        sequential = isinstance(model, keras.Sequential)
        own_class = not sequential and is_made_of_graph(type(model))
        if overridden and not own_class:
            raise UnsupportedError(
                f"Expected a model that can be built again from its layers. Found {model.name!r}, whose class "
                f"{type(model).__name__} has its own {overridden[0]!r}. Let its __init__ take inputs and outputs as "
                "keras.Model's does."
            )
        graph = model._functional if sequential else model
        inputs = keras.tree.map_structure(self._input, graph._inputs_struct)
        if sequential:
            (first,) = keras.tree.flatten(inputs)
            layers = [first, *map(self, model.layers)]
            return keras.Sequential(layers, name=model.name)
        outputs = graph._run_through_graph(inputs, operation_fn=self)
        return (type(model) if own_class else keras.Model)(inputs, outputs, name=model.name)

    def _input(self, tensor: keras.KerasTensor) -> keras.KerasTensor:
        return self._leaf(tensor._keras_history.operation).output

    def _leaf(self, layer: Any) -> keras.Layer:
        if isinstance(layer, keras.layers.Lambda):  # its config holds the function's code without what that refers to
            return type(layer)(
                layer.function,
                output_shape=layer._output_shape,
                mask=layer.mask,
                arguments=layer.arguments,
                name=layer.name,
                dtype=layer.dtype_policy,
            )
        try:
            with SafeModeScope(False), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of lambdas, which are unsafe in files from elsewhere
                activation = getattr(layer, "activation", None)
                config = {**layer.get_config(), **self._configs.get(layer, {})}
                if _of_the_user(activation) and "activation" in config:  # Keras finds it by name only if registered
                    clone = type(layer).from_config(config | {"activation": None})
                    clone.activation = activation
                    return clone
                return type(layer).from_config(config)
        except Exception as error:  # whatever the user's class raises
            raise _cannot(layer, summarize_error(error)) from error


def _of_the_user(function: Any) -> bool:
    return callable(function) and not (getattr(function, "__module__", None) or "").startswith("keras.")


def _cannot(layer: keras.Layer, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"Expected layers that can be built again from their config. Found {layer.name!r} ({type(layer).__name__}): "
        f"{why}. Give the class a get_config with all that its __init__ takes."
    )


def _compile(model: keras.Model, new: keras.Model) -> None:
    optimizer = model.optimizer
    options = dict(model._compile_config.config)
    try:
        fresh = [keras.tree.map_structure(_fresh, options[name]) for name in ("metrics", "weighted_metrics")]
        options["optimizer"] = optimizer and type(optimizer).from_config(optimizer.get_config())
    except Exception as error:  # whatever the user's class raises
        raise UnsupportedError(
            f"Expected an optimizer and metrics that can be built again from their config. Found: "
            f"{summarize_error(error)}. Register their classes and functions with "
            "keras.saving.register_keras_serializable."
        ) from error
    options["metrics"], options["weighted_metrics"] = fresh
    for name in ("jit_compile", "run_eagerly", "steps_per_execution"):  # which may have been set since
        options[name] = getattr(model, name)
    options["auto_scale_loss"] = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    new.compile(**options)
    _exclude_alike(model, new)


def _exclude_alike(model: keras.Model, new: keras.Model) -> None:
    """Keeps variables out of the weight decay that the model's optimizer leaves out, which its config does not say."""
    old, fresh = (getattr(each.optimizer, "inner_optimizer", each.optimizer) for each in (model, new))
    if old is not None and "_exclude_from_weight_decay" in vars(old):
        pairs = zip(model.weights, new.weights, strict=True)
        fresh.exclude_from_weight_decay(var_list=[copy for weight, copy in pairs if not old._use_weight_decay(weight)])


def _fresh(metric: Any) -> Any:
    return type(metric).from_config(metric.get_config()) if isinstance(metric, keras.Metric) else metric
