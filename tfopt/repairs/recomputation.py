"""D4: gradient checkpointing whose second run differs from the first.

`keras.remat` and `tf.recompute_grad` run a function again in the backward pass, outside the call of the model: a layer
that is not passed `training` falls back to inference, and Dropout and BatchNormalization are computed differently. With
`training=True`, Dropout draws another mask and BatchNormalization moves its averages again.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tfopt.errors import UnsupportedError
from tfopt.internals.graphs import gradient_function, is_second_run
from tfopt.model.layers import graph_operations, is_keras_own
from tfopt.repairs.probes import on_one_device
from tfopt.repairs.repair import Function, Repair

_RECOMPUTE = "tensorflow.python.ops.custom_gradient:recompute_grad"
_ASSIGN = "keras.src.backend.common.variables:Variable.assign"
_FLAG = "keras.src.layers.layer:Layer._resolve_and_populate_arg"
_SEED = "tensorflow.python.framework.random_seed:get_seed"


def _refuse_in_second_run(found: str) -> None:
    """Raises if the caller runs inside the second run of `tf.recompute_grad`, naming the innermost layer."""
    frame = sys._getframe(1)
    layer = None
    while frame is not None:
        code, own = frame.f_code, frame.f_locals.get("self")
        layer = layer or (own if isinstance(own, keras.Layer) else None)
        if is_second_run(code):
            where = f"layer {layer.path or layer.name!r}" if layer else "outside layers"
            raise UnsupportedError(
                "Expected a function under keras.remat or tf.recompute_grad that computes the same when the backward "
                f"pass runs it again. Found: {where}, {found}. Leave layers that draw random numbers or keep averages "
                "out of that function, or train without recomputation."
            )
        frame = frame.f_back  # type: ignore[assignment]


def _refusing_assign(original: Function) -> Function:
    def assign(self: Any, value: Any) -> Any:
        _refuse_in_second_run(f"which changes {self.name!r} again")
        return original(self, value)

    return assign


def _refusing_seed(original: Function) -> Function:
    def get_seed(op_seed: Any) -> Any:
        _refuse_in_second_run("which draws other random numbers")
        return original(op_seed)

    return get_seed


def _depends_on_training(layer: keras.Layer) -> bool:
    """Whether a layer may compute differently in training. Most of Keras' own take the flag and ignore it."""
    stateful = bool(layer._seed_generators or layer._non_trainable_variables)
    return layer._call_has_training_arg and (stateful or not is_keras_own(layer))


def _refusing_a_lost_flag(original: Function) -> Function:
    def _resolve_and_populate_arg(self: Any, arg_name: str, call_spec: Any, call_context: Any, kwargs: Any) -> None:
        passed = arg_name in call_spec.user_arguments_dict or call_context.get_value(arg_name) is not None
        if arg_name == "training" and not passed and _depends_on_training(self):
            try:
                _refuse_in_second_run("which now computes as in inference; pass it `training` inside the function")
            except UnsupportedError:
                self._maybe_reset_call_context()  # or later calls would count as calls inside this one
                raise
        original(self, arg_name, call_spec, call_context, kwargs)

    return _resolve_and_populate_arg


RECOMPUTATION = Repair(
    name="recomputation",
    defect=(
        "keras.remat and tf.recompute_grad run Dropout again with another mask or none, and BatchNormalization in "
        "inference mode or moving its averages twice: the gradients are wrong."
    ),
    reference="keras#21207.",
    broken={
        _RECOMPUTE: frozenset({"c8829bc74d6e6e1c"}),
        _ASSIGN: frozenset({"1abc462236cc8ca0"}),
        _FLAG: frozenset({"305267f4bab716ac"}),
        _SEED: frozenset({"0a88bf51d35fbb5d"}),
    },
    replace={_ASSIGN: _refusing_assign, _FLAG: _refusing_a_lost_flag, _SEED: _refusing_seed},
    probe=on_one_device("RECOMPUTATION", "recomputed", [0.0, 0.1], 1e-6, refuses=True),
    without="Do not recompute functions that draw random numbers or assign to variables.",
)


@contextmanager
def recomputation_refused() -> Iterator[None]:
    """Installs the repair while a training step is traced, unless the installed versions are unknown or mended."""
    try:
        RECOMPUTATION.applies()
    except UnsupportedError:
        yield
    else:
        with RECOMPUTATION.during():
            yield


def recomputes(graph: Any) -> bool:
    """Whether a traced forward pass holds a function that the backward pass would run again."""
    gradients = {
        operation.attr["_gradient_op_type"].s.decode()
        for operation in graph_operations(graph)
        if operation.op == "IdentityN" and "_gradient_op_type" in operation.attr
    }
    return any(_gradient_function(name).startswith("recompute_grad.") for name in gradients)


def _gradient_function(name: str) -> str:
    """The qualified name of the function that a custom gradient was registered with."""
    wrapped = inspect.getclosurevars(gradient_function(name)).nonlocals["tape_grad_fn"]
    return str(inspect.getclosurevars(wrapped).nonlocals["grad_fn"].__qualname__)
