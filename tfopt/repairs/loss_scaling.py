"""D7, D8: float16 layers that train without loss scaling, and saved models that lose it."""

import inspect
import weakref
from typing import Any

import keras

from tfopt.errors import UnsupportedError
from tfopt.repairs.repair import Function, Repair

_COMPILE = "keras.src.trainers.trainer:Trainer.compile"
_APPLY = "keras.src.optimizers.base_optimizer:BaseOptimizer.apply"

AUTOMATIC = "automatic_loss_scale_optimizer"
"""The name of a LossScaleOptimizer that nobody passed to compile; it is kept in saved models."""

# Models whose optimizer was left plain, since nothing in them computed in float16 when they were compiled.
_plain: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def automatic_wrapper(inner: keras.optimizers.Optimizer) -> keras.optimizers.LossScaleOptimizer:
    """A LossScaleOptimizer that nobody asked for; it keeps the constant scale that Keras takes away from `inner`."""
    constant = inner.loss_scale_factor
    wrapper = keras.optimizers.LossScaleOptimizer(inner, name=AUTOMATIC)
    wrapper.constant_before = constant
    return wrapper


def computes_in_float16(model: keras.Model) -> bool:
    """Tells whether any layer of a model computes in float16, so that its loss must be scaled."""
    return any(layer.compute_dtype == "float16" for layer in computing_layers(model) or [model])


def computing_layers(model: keras.Model) -> list[keras.Layer]:
    """The layers, of those in a model and the model itself, that compute something: whose dtype policy counts.

    A model made of layers, and its inputs, only take a policy, from the global one as it was when they were made. A
    model class with a `call` of its own may compute there.
    """
    return [layer for layer in model._flatten_layers() if not _only_holds_layers(layer)]


def _only_holds_layers(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.InputLayer):
        return True
    # By its call, not its class: that may add a train_step and no more.
    return isinstance(layer, keras.Model) and type(layer).call.__module__.startswith("keras.")


def _scaling_compile(original: Function) -> Function:
    """Wraps the optimizer before Keras sees it, so that the saved compile options hold the one that trains."""
    signature = inspect.signature(original)

    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        scale, optimizer = options["auto_scale_loss"], keras.optimizers.get(options["optimizer"])
        plain = optimizer is not None and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if scale and plain and computes_in_float16(self):
            optimizer = automatic_wrapper(optimizer)
            plain = False
        # Keras itself would go by the model's own policy, which a loaded model has from the global one.
        options |= {"optimizer": optimizer, "auto_scale_loss": False}
        original(*call.args, **call.kwargs)
        if not scale:
            self._compile_config.config["auto_scale_loss"] = False  # or a saved model would be wrapped when loaded
        (_plain.add if scale and plain else _plain.discard)(self)

    return compile


def _refusing_apply(original: Function) -> Function:
    """Refuses gradients of layers that compute in float16 and were not there, or did not yet, when compile looked."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        for model in list(_plain):
            if model.optimizer is self and computes_in_float16(model):
                raise UnsupportedError(
                    f"Expected the layers that compute in float16 to be there when model {model.name!r} is compiled, "
                    "so that its loss is scaled. Found some that were made, or given their policy, afterwards. Build "
                    "the model before compile (`model.build(input_shape)`, or call it on a batch), or pass compile a "
                    "keras.optimizers.LossScaleOptimizer."
                )
        return original(self, grads, trainable_variables)

    return apply


LOSS_SCALING = Repair(
    name="loss_scaling",
    defect=(
        "Trainer.compile scales the loss only if the model's own policy is mixed_float16: layers that compute in "
        "float16 by policies of their own train without, and a saved model keeps neither the LossScaleOptimizer nor "
        "the optimizer's state when it is loaded under another global policy."
    ),
    reference="Keras, Trainer.compile and Trainer.get_compile_config; no upstream report was found.",
    broken={_COMPILE: frozenset({"6ee305505df59063"}), _APPLY: frozenset({"4634947582aff41e"})},
    replace={_COMPILE: _scaling_compile, _APPLY: _refusing_apply},
    without="Pass compile a keras.optimizers.LossScaleOptimizer, or train with mixed_bfloat16.",
)
