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
"""Name of a LossScaleOptimizer that was added automatically; saved models keep it."""

# Models whose optimizer stayed plain because no layer computed in float16 when they were compiled.
_plain: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def automatic_wrapper(inner: keras.optimizers.Optimizer) -> keras.optimizers.LossScaleOptimizer:
    """Wraps an optimizer automatically, remembering the constant scale that Keras removes from `inner`."""
    constant = inner.loss_scale_factor
    wrapper = keras.optimizers.LossScaleOptimizer(inner, name=AUTOMATIC)
    wrapper.constant_before = constant
    return wrapper


def computes_in_float16(model: keras.Model) -> bool:
    """Whether any layer of a model computes in float16, so that its loss must be scaled."""
    return any(layer.compute_dtype == "float16" for layer in computing_layers(model) or [model])


def computing_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers whose dtype policy matters because they compute something, the model itself included.

    Inputs, and models that only contain layers, merely carry the global policy of their creation. A model class with
    its own `call` may compute there.
    """
    return [layer for layer in model._flatten_layers() if not _only_holds_layers(layer)]


def _only_holds_layers(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.InputLayer):
        return True
    # By its call, not its class: a subclass may only add a train_step.
    return isinstance(layer, keras.Model) and type(layer).call.__module__.startswith("keras.")


def _scaling_compile(original: Function) -> Function:
    """Wraps the optimizer before Keras sees it, so that the saved compile options contain the wrapper."""
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
        # Keras would look at the model's own policy, which a loaded model takes from the global one.
        options |= {"optimizer": optimizer, "auto_scale_loss": False}
        original(*call.args, **call.kwargs)
        if not scale:
            self._compile_config.config["auto_scale_loss"] = False  # or loading would wrap the saved model
        (_plain.add if scale and plain else _plain.discard)(self)

    return compile


def _refusing_apply(original: Function) -> Function:
    """Refuses to train float16 layers that were added, or became float16, after compile."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        for model in list(_plain):
            if model.optimizer is self and computes_in_float16(model):
                raise UnsupportedError(
                    f"Expected all float16 layers to exist when model {model.name!r} is compiled, so that its loss is "
                    "scaled. Found: some were created, or became float16, afterwards. Build the model before compile "
                    "(`model.build(input_shape)`, or call it on a batch), or pass a "
                    "keras.optimizers.LossScaleOptimizer to compile."
                )
        return original(self, grads, trainable_variables)

    return apply


LOSS_SCALING = Repair(
    name="loss_scaling",
    defect=(
        "Trainer.compile scales the loss only if the model's own policy is mixed_float16: float16 layers in any other "
        "model train without it, and a saved model loaded under another global policy loses both the "
        "LossScaleOptimizer and the optimizer's state."
    ),
    reference="Keras, Trainer.compile and Trainer.get_compile_config; no upstream report was found.",
    broken={_COMPILE: frozenset({"6ee305505df59063"}), _APPLY: frozenset({"4634947582aff41e"})},
    replace={_COMPILE: _scaling_compile, _APPLY: _refusing_apply},
    without="Pass a keras.optimizers.LossScaleOptimizer to compile, or train with mixed_bfloat16.",
)
