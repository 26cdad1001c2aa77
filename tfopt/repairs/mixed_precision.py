"""Defects of mixed precision: loss scaling that is left out or lost, and a dtype policy that `clear_session` drops.

- D1, `replica_overflow`: an overflow in any replica but the first goes unnoticed.
- D7 and D8, `loss_scaling`: float16 layers train without loss scaling, and saved models lose it.
- D9, `unscaled_loss`: a custom train_step forgets to scale the loss.
- D18, `clear_session`: it resets the global dtype policy.
"""

import inspect
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.scopes import get_state, set_state
from tfopt.model.layers import computing_layers
from tfopt.model.state import optimizers_of
from tfopt.repairs import gradient_graph
from tfopt.repairs.probes import on_one_device, on_replicas
from tfopt.repairs.repair import Function, Repair, trains_together

_COMPILE = "keras.src.trainers.trainer:Trainer.compile"
_APPLY = "keras.src.optimizers.base_optimizer:BaseOptimizer.apply"
_WRAPPER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_CLEAR = "keras.src.backend.common.global_state:clear_session"

AUTOMATIC = "automatic_loss_scale_optimizer"
"""Name of a LossScaleOptimizer that was added automatically; saved models keep it."""

# Models whose optimizer stayed plain because no layer computed in float16 when they were compiled.
_plain: weakref.WeakSet[keras.Model] = weakref.WeakSet()
# Models whose optimizers are all looked at: a GAN may hold them under any attribute.
_watched: weakref.WeakSet[keras.Model] = weakref.WeakSet()
# Optimizers whose gradients a graph showed to be scaled, one way or another.
_scaled: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()


def automatic_wrapper(inner: keras.optimizers.Optimizer) -> keras.optimizers.LossScaleOptimizer:
    """Wraps an optimizer automatically, remembering the constant scale that Keras removes from `inner`."""
    constant = inner.loss_scale_factor
    wrapper = keras.optimizers.LossScaleOptimizer(inner, name=AUTOMATIC)
    wrapper.constant_before = constant
    return wrapper


def computes_in_float16(model: keras.Model) -> bool:
    """Whether any layer of a model computes in float16, so that its loss must be scaled."""
    return any(layer.compute_dtype == "float16" for layer in computing_layers(model) or [model])


def refuse_unscaled(model: keras.Model) -> None:
    """Lets the repair `loss_scaling` look at all optimizers of a model that was compiled before it was installed."""
    _watched.add(model)


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
        (_watched.add if scale else _watched.discard)(self)

    return compile


def _refusing_apply(original: Function) -> Function:
    """Refuses to train float16 layers without loss scaling: added after compile, or with another optimizer."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        for model in list(_watched):
            held = optimizers_of(model)
            where = held.get(self) if self is not model.optimizer and not _is_scaling(self) else None
            if where and computes_in_float16(model) and _in_float16(grads) and not _scaled_by_hand(self, grads):
                raise UnsupportedError(
                    "Expected every optimizer of a model with float16 layers to scale the loss, or train_step to do it "
                    f"by hand. Found: {where} is a plain {type(self).__name__}, and small gradients would become zero. "
                    "Wrap it in keras.optimizers.LossScaleOptimizer, and in train_step, inside the tf.GradientTape, "
                    "write `loss = optimizer.scale_loss(loss)`; or use mixed_bfloat16."
                )
        for model in list(_plain):
            if model.optimizer is self and computes_in_float16(model) and not _scaled_by_hand(self, grads):
                raise UnsupportedError(
                    f"Expected all float16 layers to exist when model {model.name!r} is compiled, so that its loss is "
                    "scaled. Found: some were created, or became float16, afterwards. Build the model before compile "
                    "(`model.build(input_shape)`, or call it on a batch), or pass a "
                    "keras.optimizers.LossScaleOptimizer to compile."
                )
        return original(self, grads, trainable_variables)

    return apply


def _is_scaling(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _in_float16(grads: Any) -> bool:
    return tf.executing_eagerly() or gradient_graph.in_float16(grads)


def _scaled_by_hand(optimizer: keras.optimizers.Optimizer, grads: Any) -> bool:
    """Whether a plain optimizer applies gradients that are divided by what the loss was multiplied by.

    Only a graph shows that; what it has shown holds for eager steps too.
    """
    if not tf.executing_eagerly() and gradient_graph.scaled_by_hand(grads):
        _scaled.add(optimizer)
    return optimizer in _scaled


LOSS_SCALING = Repair(
    name="loss_scaling",
    defect=(
        "Trainer.compile scales the loss only if the model's own policy is mixed_float16: float16 layers in any other "
        "model train without it, and a saved model loaded under another global policy loses both the "
        "LossScaleOptimizer and the optimizer's state."
    ),
    reference="Keras, Trainer.compile and Trainer.get_compile_config; no upstream report was found.",
    broken={_COMPILE: frozenset({"6ee305505df59063", "ece08fa5848ea502"}), _APPLY: frozenset({"4634947582aff41e"})},
    replace={_COMPILE: _scaling_compile, _APPLY: _refusing_apply},
    probe=on_one_device("LOSS_SCALING", "loss_scaling", [1.0, 8.0], 1e-3),
    without="Pass a keras.optimizers.LossScaleOptimizer to compile, or train with mixed_bfloat16.",
)


def _noting_scale_loss(original: Function) -> Function:
    def scale_loss(self: Any, loss: Any) -> Any:
        @tf.custom_gradient
        def noted(scaled: tf.Tensor) -> Any:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                _scaled.add(self)  # it was not only called: gradients of its result are taken
                return upstream

            return tf.identity(scaled), backward

        return noted(tf.convert_to_tensor(original(self, loss)))

    return scale_loss


def _asking_apply(original: Function) -> Function:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if self not in _scaled and not _multiplied(self, grads):
            raise UnsupportedError(
                "Expected the loss to be scaled before its gradients are taken, because LossScaleOptimizer divides "
                f"them by the scale ({self.initial_scale:g} at first). Found: scale_loss was never called on "
                f"{self.name!r}, or its result was not used, so the weights would hardly move. In train_step, inside "
                "the tf.GradientTape and after the loss, write `loss = self.optimizer.scale_loss(loss)`."
            )
        return original(self, grads, trainable_variables)

    return apply


def _multiplied(optimizer: keras.optimizers.LossScaleOptimizer, grads: list[Any]) -> bool:
    """Whether train_step itself multiplies by the optimizer's scale, which exists from its second trace on."""
    if tf.executing_eagerly():
        return False
    return not optimizer.built or gradient_graph.depends_on(grads, optimizer.dynamic_scale.value)


UNSCALED_LOSS = Repair(
    name="unscaled_loss",
    defect=(
        "LossScaleOptimizer divides the gradients by the loss scale even if a custom train_step never multiplied the "
        "loss by it: the weights hardly move, without any error."
    ),
    reference="Keras, LossScaleOptimizer.apply; no upstream report was found.",
    broken={
        f"{_WRAPPER}.apply": frozenset({"d9ab44f3671faadc"}),
        f"{_WRAPPER}.scale_loss": frozenset({"78d5d041ca7676f4"}),
    },
    replace={f"{_WRAPPER}.apply": _asking_apply, f"{_WRAPPER}.scale_loss": _noting_scale_loss},
    probe=on_one_device("UNSCALED_LOSS", "unscaled_loss", [1.0], 1e-3, refuses=True),
    without="Make sure that a custom train_step calls `self.optimizer.scale_loss(loss)` inside the tape.",
)


def _everywhere(original: Function) -> Function:
    """Makes the check cover all replicas, as `_tf_apply` assumes."""

    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if not trains_together():
            return finite
        context = tf.distribute.get_replica_context()
        # All-reduced rather than gathered, to reach the replicas of other workers too.
        replicas = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(finite, tf.float32))
        return tf.equal(replicas, float(context.num_replicas_in_sync))

    return check_finite


REPLICA_OVERFLOW = Repair(
    name="replica_overflow",
    defect=(
        "Under a tf.distribute strategy with several replicas, LossScaleOptimizer checks only the first replica's "
        "gradients, before they are summed: an overflow in another replica makes the weights NaN and leaves the loss "
        "scale as it was."
    ),
    reference="Keras, LossScaleOptimizer._tf_apply: its comment assumes all-reduced gradients; "
    "no upstream report was found.",
    broken={
        f"{_WRAPPER}._tf_apply": frozenset({"f7a5002bd16a56be"}),
        f"{_WRAPPER}.check_finite": frozenset({"5386095841a09c2e"}),
    },
    replace={f"{_WRAPPER}.check_finite": _everywhere},
    probe=on_replicas("REPLICA_OVERFLOW", "overflow", [0, 2.0**14]),
    without="Train with mixed_bfloat16, which needs no loss scaling, or on a single replica.",
)


def _keeping_the_policy(original: Function) -> Function:
    def clear_session(free_memory: bool = True) -> None:
        policy = get_state("dtype_policy")
        original(free_memory)
        set_state("dtype_policy", policy)

    return clear_session


CLEAR_SESSION = Repair(
    name="clear_session",
    defect="clear_session drops the global dtype policy: models created afterwards compute in float32.",
    reference="Keras, clear_session in keras/src/backend/common/global_state.py; no upstream report was found.",
    broken={_CLEAR: frozenset({"50df48c29bd60095"})},
    replace={_CLEAR: _keeping_the_policy},
    probe=on_one_device("CLEAR_SESSION", "cleared_policy", "mixed_bfloat16"),
    without="Set the policy again after each clear_session.",
)
