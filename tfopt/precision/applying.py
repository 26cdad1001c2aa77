"""A float32 model turned into a mixed one and back, in place."""

import gc
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import keras
from keras.src.models.functional import Functional

from tfopt import repairs
from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.model.require import is_keras_own
from tfopt.precision.float8 import made_anew, quantize, split_float8
from tfopt.precision.layer_policies import Policy, present, resolved, set_policies
from tfopt.precision.loss_scaling import scale_loss, unscale_loss

_SPATIAL_DROPOUT = (keras.layers.SpatialDropout1D, keras.layers.SpatialDropout2D, keras.layers.SpatialDropout3D)


_OPTIMIZER, _SCALING = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` changed.

    Attributes:
        changed: The path of each layer that changed, to the name of its new policy.
        loss_scaled: Whether the model's optimizer scales the loss, which float16 needs; None if it is not compiled.
        unsaved: The paths of layers whose policy a saved model does not bring back, since code of the user's makes
            them, or Keras does not save it: apply again after loading.
    """

    changed: Mapping[str, str]
    loss_scaled: bool | None
    unsaved: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        counts = Counter(self.changed.values())
        layers = ", ".join(f"{count} {'layer' if count == 1 else 'layers'} to {name}" for name, count in counts.items())
        parts = [f"Changed {layers}" if layers else "Changed nothing"]
        if self.loss_scaled is not None:
            parts.append("the loss is scaled" if self.loss_scaled else "the loss is not scaled")
        if self.unsaved:
            parts.append(f"apply again after loading a saved model, for {', '.join(self.unsaved)}")
        return f"{'; '.join(parts)}."


def apply(model: keras.Model, policy: Policy) -> Applied:
    """Turns a model into one of another dtype policy, in place: the same weights, and the state of its training.

    Weights stay float32 variables, so that `apply(model, "float32")` gives back the model that was there. From the
    next step of `fit`, `evaluate` and `predict` on it computes as a model made under that policy with float32 outputs
    does. Where a layer then computes in float16, the optimizer is put into a LossScaleOptimizer, iterations and slots
    included, unless the model was compiled with `auto_scale_loss=False`; where none does any more, a wrapper that the
    user did not ask for is taken off. Keras scales the loss only of models made under a global mixed_float16: for one
    that is not compiled yet, and for those loaded later, `tfopt.repairs` is installed.

    "float8" quantizes the Dense and EinsumDense layers but those that make the outputs, to train with 8-bit matrix
    products. It adds weights (scales and histories of the largest values), for which the optimizer is made anew with
    the state that it had, and cannot be taken back.

    One policy goes to every layer that computes in floating point, except those that make the model's outputs: they
    stay in float32, since a softmax or logits in 16 bits saturate the loss in silence. A mapping names layers:

    - by path ("encoder/attention/query", names from the model down), by Keras' own `layer.path`, by name ("query"),
      or by a regular expression that matches a whole path ("encoder/.*"); a path goes before a name, a name before
      an expression;
    - a layer that holds others (a nested model, attention, an RNN) hands its policy down to those not named
      themselves; a layer that is not named, nor inside one that is, keeps the policy that it has (in a
      `DTypePolicyMap`: gets the map's default);
    - layers that make outputs change only where a path or a name, not an expression, names them.

    Layers of integers and text, inputs, and `Normalization` (whose constants are kept in the dtype it was built in)
    are left alone. Functions of your own that were traced before go on as they were.

    Args:
        model: A Keras model, compiled or not, fitted or not; built or not. Of a subclassed model the outputs are known
            once it was called on data.
        policy: A name ("float32", "mixed_bfloat16", "mixed_float16", "auto" for what `recommend()` names) or a Keras
            policy for the whole model, or a mapping of layers to either. Also "float8", with the other layers as they
            are, and "float8_from_mixed_bfloat16", with the others in mixed_bfloat16.

    Returns:
        Which layers changed, and whether the loss is scaled.

    Raises:
        TypeError: `model` is no Keras model, a policy neither a name nor a Keras policy, or a key of the mapping no
            text.
        ValueError: An unknown policy, a key that no layer has or that names one of those left alone, a layer that
            several expressions match, or a model without layers. The model is then unchanged, as after the next.
        tfopt.errors.UnsupportedError: A built layer keeps its weights in another dtype than the policy asks for, a
            layer is quantized, the layers that make the outputs cannot be found, Keras' functions that the
            loss-scaling repairs replace are not known, or another compiled model outside has some of the layers. Also
            where float16 finds optimizers beside `model.optimizer` that do not scale the loss, and float8 an optimizer
            that its config cannot make anew.

    Example:
        >>> print(tfopt.precision.apply(model, "mixed_float16"))
        Changed 16 layers to mixed_float16; the loss is scaled.
        >>> tfopt.precision.apply(model, {"encoder": "mixed_bfloat16"})  # the others as they are
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a keras.Model. Received: {model!r}. Apply policies to one model at a time.")
    base, quantized = split_float8(model, policy)
    policies = resolved(model, base)
    paths = layer_paths(model)
    before = {layer: present(layer) for layer in paths}
    _check_other_models(paths, {*quantized, *(x for x, wanted in policies.items() if wanted != before[x])})
    optimizer = made_anew(model) if quantized else None
    computing = repairs.computing_layers(model)
    if any(policies[layer].compute_dtype == "float16" for layer in computing if layer in policies):
        _check_other_optimizers(paths)
        repairs.install(*repairs.FLOAT16)
    set_policies(policies)
    quantize(model, quantized, optimizer)
    _keep_in_config(model)
    scaled = _scale_or_not(model)
    for trained in [layer for layer in paths if isinstance(layer, keras.Model)]:
        _scale_or_not(trained)  # one inside may be compiled, too
        _renew_functions(trained)
    changed = {paths[layer]: present(layer).name for layer in computing if present(layer) != before[layer]}
    return Applied(changed, scaled, tuple(paths[layer] for layer in _unsaved(model)))


def _check_other_models(paths: Mapping[keras.Layer, str], changing: set[keras.Layer]) -> None:
    """Refuses layers that a compiled model outside trains, too: its optimizer and functions would stay as they are."""

    def others() -> list[keras.Model]:
        # By type(): isinstance would ask proxies, also dead ones, for their class.
        models = [x for x in gc.get_objects() if issubclass(type(x), keras.Model) and x not in paths]
        return [x for x in models if getattr(x, "compiled", False) and not changing.isdisjoint(x._flatten_layers())]

    if not changing or not others():
        return
    gc.collect()  # a model that was deleted lives on until then
    if found := others():
        shared = [paths[layer] for layer in paths if layer in changing and layer in found[0]._flatten_layers()][-1]
        raise UnsupportedError(
            f"Expected layers that no other compiled model trains. Found {shared!r}, which {found[0].name!r} has, too: "
            "its loss would not be scaled, and what it traced would stay. Apply the policy to the model around both, "
            "with a mapping that names the layers by path; or compile that one afterwards."
        )


def _check_other_optimizers(paths: Iterable[keras.Layer]) -> None:
    """Refuses optimizers beside `model.optimizer` that do not scale the loss, as those of a GAN."""
    for model in [layer for layer in paths if isinstance(layer, keras.Model)]:
        for name, value in vars(model).items():
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            plain = [x for x in inside if isinstance(x, _OPTIMIZER) and not isinstance(x, _SCALING)]
            # Keras' own attribute, and TensorFlow's records of what is tracked.
            if plain and name != "optimizer" and not name.startswith("_self_"):
                raise UnsupportedError(
                    f"Expected the only optimizer to be model.optimizer, which can be put into a LossScaleOptimizer. "
                    f"Found {name!r} of {model.name!r}, which float16 would train without loss scaling. Wrap it "
                    "yourself in keras.optimizers.LossScaleOptimizer, with scale_loss in train_step, or use "
                    "mixed_bfloat16."
                )


def _renew_functions(model: keras.Model) -> None:
    """Lets a model trace anew, also inside of `fit`, which calls the function that the model has at each step."""
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function") is not None:
            getattr(model, f"make_{kind}_function")(force=True)


def _scale_or_not(model: keras.Model) -> bool | None:
    if not model.compiled:
        return None
    if repairs.computes_in_float16(model):
        return scale_loss(model)
    unscale_loss(model)
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def _keep_in_config(model: keras.Model) -> None:
    """Writes policies of layers inside Keras' own layers (a projection of attention) into that layer's config.

    Such a layer makes its inner ones anew when it is loaded, and asks its DTypePolicyMap for each by its path.
    """
    for outer in model._flatten_layers():
        if isinstance(outer, keras.Model) or not outer._layers or not is_keras_own(outer):
            continue
        default = present(outer)
        others = {
            _loaded_path(outer, inner): present(inner)
            for inner in outer._flatten_layers(include_self=False)
            if inner.path and present(inner) != default
        }
        if others:
            outer._dtype_policy = keras.dtype_policies.DTypePolicyMap(default.name, others)
        elif isinstance(outer._dtype_policy, keras.dtype_policies.DTypePolicyMap):
            outer._dtype_policy = default


def _loaded_path(outer: keras.Layer, inner: keras.Layer) -> str:
    """An expression for the path that a layer has when the one around it is loaded.

    What holds that one need not be there yet: Bidirectional loads its RNNs before itself.
    """
    inside = inner.path.removeprefix(outer.path or "").lstrip("/")
    return rf"(.*/)?{re.escape(outer.name)}/{re.escape(inside)}"


def _unsaved(model: keras.Model) -> list[keras.Layer]:
    """Layers whose policy a saved model does not bring back."""
    found = []

    def walk(outer: keras.Layer, users: bool) -> None:
        users = users or not (is_keras_own(outer) or isinstance(outer, Functional))
        for inner in outer._flatten_layers(include_self=False, recursive=False):
            policy = present(inner)
            # The user's code makes it anew, under the global policy.
            made = users and policy != keras.config.dtype_policy()
            # Without a path it stands in no map.
            alone = not isinstance(outer, keras.Model) and inner.path is None and policy != present(outer)
            # Keras keeps only the dtype of its weights.
            spatial = isinstance(inner, _SPATIAL_DROPOUT) and policy.name != policy.variable_dtype
            if made or alone or spatial:
                found.append(inner)
            walk(inner, users)

    walk(model, False)
    return found
