"""Computes element-wise activations again, such as GELU and SiLU, together with the layer behind them.

For the gradient of `Dense(gelu(x))`, TensorFlow keeps x, what the GELU computed on the way, and the layer's input
gelu(x). All but x follow from x, for the price of a pass over memory.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import activations

from tfopt.internals.layers import Functional, operations
from tfopt.memory.recomputation.rerunning import Part, is_differentiated, is_stateful
from tfopt.model.layers import layer_paths, layers_and_graphs

_MADE_OF = "_tfopt_made_of"  # on a tensor: the function that made it, and its argument

# Their gradients take their outputs alone, or they mix elements.
_OUTPUT_SUFFICES = (
    *(activations.linear, activations.relu, activations.relu6, activations.tanh, activations.sigmoid, activations.elu),
    *(activations.selu, activations.exponential, activations.softmax, activations.log_softmax, activations.sparsemax),
)
# Activations as operations, such as `keras.ops.gelu(x)` in a Functional model, and as layers of their own.
_OPERATIONS = (
    *operations("nn.Gelu", "nn.Silu", "nn.HardSilu", "nn.LeakyRelu", "nn.Softplus", "nn.Softsign", "nn.LogSigmoid"),
    *operations("nn.Celu", "nn.Squareplus"),
    *(keras.layers.LeakyReLU, keras.layers.Activation),
)
# They keep their input for the gradient of their weights, and apply `activation` last.
_LINEAR = (
    *(keras.layers.Dense, keras.layers.EinsumDense),
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)


class Activations:
    """The activations of a model that are computed again, the first `count` of them.

    Args:
        model: A built model.

    Raises:
        ValueError: If it has none whose gradient takes more than their outputs.
    """

    def __init__(self, model: keras.Model) -> None:
        self._paths: dict[keras.Operation, str] = dict(layer_paths(model))
        for graph in layers_and_graphs(model):
            if isinstance(graph, Functional):
                self._paths |= {one: one.name for one in graph._operations if one not in self._paths}
        self._owners = list(filter(_has_activation, self._paths))
        self.count = self.most = len(self._owners)
        if not self._owners:
            raise ValueError(
                "Expected a model with activations that keep more than their output, such as GELU and SiLU. Received: "
                f"{model.name!r}, in which no layer has one. Leave out `layers`, or name the layers to compute again."
            )

    def calls(self) -> dict[keras.Operation, "ActivationCall"]:
        """Returns what takes the place of each `call`."""
        chosen = self._owners[: self.count]
        linear = [one for one in self._paths if _is_own(one, _LINEAR)]
        return {
            one: ActivationCall(one, self._paths[one], again=one in chosen)
            for one in dict.fromkeys((*chosen, *linear))
            if "call" not in vars(one)  # or it may do more
        }


class ActivationCall:
    """Replaces the `call` of a layer or operation; recomputes its activation, and the one before it, for the gradient.

    Args:
        owner: The layer or operation.
        path: What errors call it.
        again: Whether its own activation is computed again.
    """

    def __init__(self, owner: keras.Operation, path: str, *, again: bool) -> None:
        self.count = int(again)
        """Of the activations that are computed again."""
        self._owner, self._path, self._stock = owner, path, owner.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns what the `call` does."""
        if not is_differentiated(args, kwargs):
            return self._stock(*args, **kwargs)
        if _is_own(self._owner, _LINEAR):
            return self._product(*args, **kwargs)
        return self._activated(self._stock, *args, **kwargs)

    def _product(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes a layer that applies its activation last."""
        owner, activation = self._owner, self._owner.activation
        function, source = getattr(inputs, _MADE_OF, (None, inputs))
        if function is not None and source.graph is not tf.compat.v1.get_default_graph():
            function, source = None, inputs  # outside the loop, branch or function that this call is in
        if function is None and (activation is None or not self.count):
            return self._stock(inputs, *args, **kwargs)
        # Not the layer itself, which another thread may be calling.
        without = object.__new__(type(owner))
        vars(without).update(vars(owner), activation=None)

        def linear(source: Any, *args: Any, **kwargs: Any) -> Any:
            return type(owner).call(without, source if function is None else function(source), *args, **kwargs)

        run = linear if function is None else Part(f"layer {self._path!r}", linear, owner)
        outputs = run(source, *args, **kwargs)
        if activation is None:
            return outputs
        return self._activated(activation, outputs) if self.count else activation(outputs)

    def _activated(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Applies an activation, whose result tells the layer behind it how it was made."""
        if len(args) != 1 or kwargs or not _is_pure(function, args[0]):
            return function(*args, **kwargs)
        outputs = Part(f"the activation of {self._path!r}", function, self._owner)(*args)
        setattr(outputs, _MADE_OF, (function, *args))
        return outputs


def _is_pure(function: Callable[..., Any], inputs: Any) -> bool:
    """Whether a function makes one tensor from another one of this graph, from nothing else, and does nothing else."""
    if not tf.is_symbolic_tensor(inputs) or inputs.graph is not tf.compat.v1.get_default_graph():
        return False
    # Elsewhere, since what it adds to this graph, such as assignments, would run.
    scratch = tf.__internal__.FuncGraph("scratch")
    with scratch.as_default(), keras.StatelessScope(collect_losses=True) as scope:
        outputs = function(tf.compat.v1.placeholder(inputs.dtype, inputs.shape))
    if not tf.is_symbolic_tensor(outputs) or outputs.graph is not scratch:
        return False
    return not (scratch.captures or scope.losses or is_stateful(scratch))


def _is_own(operation: keras.Operation, kinds: tuple[type, ...]) -> bool:
    """Whether it is of one of these classes of Keras; a subclass may compute anything."""
    return isinstance(operation, kinds) and type(operation).__module__.startswith("keras.")


def _has_activation(operation: keras.Operation) -> bool:
    """Whether a layer or an operation has an activation that keeps more than its output."""
    if not _is_own(operation, (*_LINEAR, keras.layers.Activation)):
        return _is_own(operation, _OPERATIONS)
    function = operation.activation
    return callable(function) and function not in _OUTPUT_SUFFICES and not isinstance(function, keras.Layer)
