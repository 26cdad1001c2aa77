"""`apply`: puts an existing model under another dtype policy, in place."""

import gc
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import keras

from tfopt import repairs
from tfopt.errors import UnsupportedError
from tfopt.internals.layers import Functional
from tfopt.model.layers import computing_layers, is_keras_own, require_model
from tfopt.model.state import STEP_FUNCTIONS, optimizers_of, rebuild_step_function
from tfopt.model.undoing import undone_if_failed
from tfopt.precision.float8_margins import Float8Margin, recorded_margins
from tfopt.precision.layer_policies import (
    Policy,
    assign_policies,
    current_policy,
    is_16_bit,
    quantize,
    set_policies,
)
from tfopt.precision.optimizer_swap import rebuilt_optimizer, replace_optimizer, scale_loss, unscale_loss
from tfopt.precision.policies import keep_ids
from tfopt.text import Shown, listed

_SPATIAL_DROPOUT = (keras.layers.SpatialDropout1D, keras.layers.SpatialDropout2D, keras.layers.SpatialDropout3D)
_NAMED = 4


@dataclass(frozen=True, slots=True, repr=False)
class Applied(Shown):
    """What `apply` changed."""

    changed: Mapping[str, str]
    """Names of the new policies by layer path."""
    scaling: Mapping[str, bool]
    """Whether each optimizer that the model holds scales the loss, which float16 needs, by where it is held."""
    unsaved: tuple[str, ...] = ()
    """Paths of layers whose policy saving does not preserve: user code makes them, or Keras drops it. Apply again."""

    float8: tuple[Float8Margin, ...] = ()
    """The amax history and margin of each float8 layer's inputs, kernel and output gradient so far in training."""

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        derived = {"loss_scaled": self.loss_scaled, "float8": [one.to_dict() for one in self.float8]}
        return asdict(self) | derived

    @property
    def loss_scaled(self) -> bool | None:
        """Whether every optimizer that the model holds scales the loss; None if it holds none."""
        return all(self.scaling.values()) if self.scaling else None

    def __str__(self) -> str:
        counts = Counter(self.changed.values())
        layers = ", ".join(f"{count} {'layer' if count == 1 else 'layers'} to {name}" for name, count in counts.items())
        parts = [f"Changed {layers}" if layers else "Changed nothing"]
        scaled, plain = ([name for name, scales in self.scaling.items() if scales is one] for one in (True, False))
        if scaled and plain:  # as in a GAN
            parts.append(f"the loss is scaled by {listed(scaled, _NAMED)}, but not by {listed(plain, _NAMED)}")
        elif self.scaling:
            parts.append("the loss is scaled" if scaled else "the loss is not scaled")
        if self.unsaved:
            parts.append(f"apply again after loading a saved model, for {listed(self.unsaved, _NAMED)}")
        if seen := [one for one in self.float8 if one.margin is not None]:
            least = min(seen, key=lambda one: one.margin or 0.0)
            parts.append(f"float8's smallest margin is {least.margin:.3g}×, in the {least.tensor} of {least.path!r}")
        return f"{'; '.join(parts)}."


def apply(model: keras.Model, policy: Policy) -> Applied:
    """Puts a model under another dtype policy in place, with the same weights and training state.

    Weights stay float32 variables, so `apply(model, "float32")` restores the original model. From the next step of
    `fit`, `evaluate` or `predict` the model computes like one made under that policy with float32 outputs; functions
    you traced earlier do not change.

    Where a layer computes in float16, the optimizer is wrapped in a LossScaleOptimizer, iterations and slots included,
    unless the model was compiled with `auto_scale_loss=False`; where none does any more, a wrapper you did not add
    yourself is removed. For a model compiled or loaded later, `tfopt.repairs.FLOAT16` is installed.

    A policy goes to every layer that computes in floating point, except those that make the model's outputs: 16-bit
    logits or probabilities silently saturate the loss. A layer that contains such a layer, as an embedding whose table
    also makes the logits, stays in float32 with it. A mapping selects layers:

    - by path ("encoder/attention/query", names from the model down), by Keras' own `layer.path`, by name ("query"),
      or by a regular expression that matches a whole path ("encoder/.*"); a path overrides a name, a name overrides an
      expression;
    - a layer that holds others (a nested model, attention, an RNN) passes its policy down to those not selected
      themselves; all other layers keep their policy (or get the default of a `DTypePolicyMap`);
    - layers that make outputs change only if a path or a name selects them, not an expression.

    Layers of integers and strings, and `Normalization` (whose constants keep the dtype it was built in), do not change.
    Inputs of 16 bits become float32, so that ids are not rounded, and `tfopt.repairs.ROUNDED_IDS` is installed.
    docs/precision.md covers saving, float8 and what is refused.

    Args:
        model: A Keras model in any state; a subclassed one must have been called on data, to find its outputs.
        policy: A name ("float32", "mixed_bfloat16", "mixed_float16", "auto" for what `recommend()` names) or a Keras
            policy for the whole model, or a mapping from layers to either. "float8" quantizes Dense and EinsumDense
            layers other than the outputs, irreversibly; "float8_from_mixed_bfloat16" puts the others into
            mixed_bfloat16 as well.

    Returns:
        Which layers changed, and which of the model's optimizers scale the loss.

    Raises:
        TypeError: If `model` is not a Keras model, a policy is neither a name nor a Keras policy, or a key of the
            mapping is not a string.
        ValueError: If a policy is unknown, a key matches no layer or one that cannot change, several expressions match
            a layer, or the model has no layers. The model is unchanged after this and any other error.
        tfopt.errors.UnsupportedError: If a built layer keeps its weights in another dtype than the policy, a layer is
            quantized, the output layers cannot be found, another compiled model shares layers that change, or the
            repairs do not know the installed Keras. For float8 also if a layer has LoRA weights, or the optimizer
            cannot be rebuilt from its config.

    Example:
        >>> print(tfopt.precision.apply(model, "mixed_float16"))
        Changed 16 layers to mixed_float16; the loss is scaled.
        >>> tfopt.precision.apply(model, {"encoder": "mixed_bfloat16"})  # the others keep their policies
    """
    require_model(model)
    assigned = assign_policies(model, policy)
    paths, policies, quantized = assigned.paths, assigned.policies, assigned.quantized
    before = {layer: current_policy(layer) for layer in paths}
    _check_other_models(paths, {*quantized, *(x for x, wanted in policies.items() if wanted != before[x])})
    optimizer = rebuilt_optimizer(model) if quantized else None
    computing = computing_layers(model)
    if any(policies[layer].compute_dtype == "float16" for layer in computing if layer in policies):
        repairs.install(*repairs.FLOAT16)
        repairs.refuse_unscaled(model)
    if any(is_16_bit(policies[layer]) for layer in computing if layer in policies):
        keep_ids()
    with _all_or_nothing(model):
        set_policies(policies)
        quantize(quantized)
        if optimizer is not None:
            replace_optimizer(model, optimizer)
        _keep_in_config(model)
        for trained in [layer for layer in paths if isinstance(layer, keras.Model)]:
            _scale_or_not(trained)  # a nested model may be compiled too
            for name in STEP_FUNCTIONS:
                rebuild_step_function(trained, name)
    changed = {
        paths[layer]: current_policy(layer).name for layer in computing if current_policy(layer) != before[layer]
    }
    return Applied(changed, _scaling(model), tuple(paths[x] for x in _unsaved(model)), recorded_margins(paths))


@contextmanager
def _all_or_nothing(model: keras.Model) -> Iterator[None]:
    """Takes back what a block of code has done to a model if it fails or is interrupted in the middle."""
    layers = model._flatten_layers()
    options = {x: dict(x._compile_config.config) for x in layers if isinstance(x, keras.Model) and x.compiled}
    dtypes = {layer: layer.dtype for layer in layers if isinstance(layer, keras.layers.InputLayer)}
    try:
        with undone_if_failed(model):
            yield
    except BaseException:
        for compiled, given in options.items():
            compiled._compile_config.config.update(given)
        for layer, dtype in dtypes.items():
            repairs.set_input_dtype(layer, dtype)
        raise


def _check_other_models(paths: Mapping[keras.Layer, str], changing: set[keras.Layer]) -> None:
    """Refuses layers that another compiled model trains too: its optimizer and traced functions would not change."""

    def others() -> list[keras.Model]:
        # type() rather than isinstance, which would ask weak proxies, even dead ones, for their class.
        models = [x for x in gc.get_objects() if issubclass(type(x), keras.Model) and x not in paths]
        return [x for x in models if getattr(x, "compiled", False) and not changing.isdisjoint(x._flatten_layers())]

    if not changing or not others():
        return
    gc.collect()  # deleted models live on in reference cycles
    if found := others():
        shared = [paths[layer] for layer in paths if layer in changing and layer in found[0]._flatten_layers()][-1]
        raise UnsupportedError(
            f"Expected layers that no other compiled model trains. Found {shared!r}, which {found[0].name!r} has too: "
            "its loss would not be scaled, and its traced functions would not change. Apply the policy to the outer "
            "model, with a mapping that names the layers by path; or compile the other model afterwards."
        )


def _scale_or_not(model: keras.Model) -> None:
    if model.compiled:
        (scale_loss if repairs.computes_in_float16(model) else unscale_loss)(model)


def _scaling(model: keras.Model) -> dict[str, bool]:
    held = optimizers_of(model)
    scaling = [one for one in held if isinstance(one, keras.optimizers.LossScaleOptimizer)]
    # A wrapper's inner optimizer that the model holds too gets the wrapper's gradients.
    inner = {id(one.inner_optimizer) for one in scaling}
    return {where: one in scaling for one, where in held.items() if id(one) not in inner}


def _keep_in_config(model: keras.Model) -> None:
    """Writes policies of layers inside Keras' own layers (a projection of attention) into the outer layer's config.

    When loaded, such a layer recreates its inner ones and looks up each one's path in its DTypePolicyMap.
    """
    for outer in model._flatten_layers():
        if isinstance(outer, keras.Model) or not outer._layers or not is_keras_own(outer):
            continue
        default = current_policy(outer)
        others = {
            _loaded_path(outer, inner): current_policy(inner)
            for inner in outer._flatten_layers(include_self=False)
            if inner.path and current_policy(inner) != default
        }
        if others:
            outer._dtype_policy = keras.dtype_policies.DTypePolicyMap(default.name, others)
        elif isinstance(outer._dtype_policy, keras.dtype_policies.DTypePolicyMap):
            outer._dtype_policy = default


def _loaded_path(outer: keras.Layer, inner: keras.Layer) -> str:
    """A regular expression for the path of an inner layer while the outer one is loaded.

    The parents of the outer layer may be missing then: Bidirectional loads its RNNs before itself.
    """
    inside = inner.path.removeprefix(outer.path or "").lstrip("/")
    return rf"(.*/)?{re.escape(outer.name)}/{re.escape(inside)}"


def _unsaved(model: keras.Model) -> list[keras.Layer]:
    """Layers whose policy saving does not preserve."""
    found = []

    def walk(outer: keras.Layer, users: bool) -> None:
        users = users or not (is_keras_own(outer) or isinstance(outer, Functional))
        for inner in outer._flatten_layers(include_self=False, recursive=False):
            policy = current_policy(inner)
            # User code recreates it under the global policy.
            recreated = users and policy != keras.config.dtype_policy()
            # Without a path it cannot be in a DTypePolicyMap.
            unmapped = not isinstance(outer, keras.Model) and inner.path is None and policy != current_policy(outer)
            # Keras saves only the dtype of its weights.
            spatial = isinstance(inner, _SPATIAL_DROPOUT) and policy.name != policy.variable_dtype
            if recreated or unmapped or spatial:
                found.append(inner)
            walk(inner, users)

    walk(model, False)
    return found
