"""Computes element-wise activations again, such as GELU and SiLU, together with the layer behind them.

For the gradient of `Dense(gelu(x))`, TensorFlow keeps x, what the GELU computed on the way, and the layer's input
gelu(x). All but x follow from x, for the price of a pass over memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import activations
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv
from keras.src.models.functional import Functional
from keras.src.ops import nn
from tensorflow.python.ops.control_flow_util_v2 import in_while_loop_defun

from tfopt.memory.recomputation.rerunning import Part, is_differentiated, is_stateful
from tfopt.model.layers import layer_paths, layers_and_graphs

_MADE_OF = "_tfopt_made_of"  # on a tensor: the function that made it, and its argument

# Their gradients take their outputs alone, or they mix elements.
_OUTPUT_SUFFICES = (
    *(activations.linear, activations.relu, activations.relu6, activations.tanh, activations.sigmoid, activations.elu),
    *(activations.selu, activations.exponential, activations.softmax, activations.log_softmax, activations.sparsemax),
)
# Activations as operations, such as `keras.ops.gelu(x)` in a Functional model, and as layers without `activation`.
_OPERATIONS = (
    *(nn.Gelu, nn.Silu, nn.HardSilu, nn.LeakyRelu, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Celu, nn.Squareplus),
    keras.layers.LeakyReLU,
)
# They keep their input for the gradient of their weights, and apply `activation` last.
_LINEAR = (
    *(keras.layers.Dense, keras.layers.EinsumDense),
    *(BaseConv, BaseConvTranspose, BaseDepthwiseConv, BaseSeparableConv),
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
        linear = [one for one in self._paths if isinstance(one, _LINEAR)]
        return {
            one: ActivationCall(one, self._paths[one], again=one in chosen) for one in dict.fromkeys(chosen + linear)
        }


class ActivationCall:
    """Computes what the `call` of a layer or an operation does, but its activation, and the one before it, again.

    Args:
        owner: The layer or operation.
        path: What errors call it.
        again: Whether its own activation is computed again.
    """

    def __init__(self, owner: keras.Operation, path: str, *, again: bool) -> None:
        self.count = int(again)
        """Of the activations that are computed again."""
        self._owner, self._path, self._stock = owner, path, owner.call

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns what the `call` does."""
        if isinstance(self._owner, _OPERATIONS):
            return self._activated(self._stock, inputs)
        function, source = getattr(inputs, _MADE_OF, (None, inputs)) if _may_repeat(inputs) else (None, inputs)
        activation = self._owner.activation
        if not isinstance(self._owner, _LINEAR):
            with self._activation(lambda x: self._activated(activation, x)):
                return self._stock(inputs, *args, **kwargs)
        if function is None and not self.count:
            return self._stock(inputs, *args, **kwargs)

        def linear(source: Any, *args: Any, **kwargs: Any) -> Any:
            with self._activation(None):
                return self._stock(source if function is None else function(source), *args, **kwargs)

        run = linear if function is None else Part(f"layer {self._path!r}", linear, self._owner)
        outputs = run(source, *args, **kwargs)
        if self.count:
            return self._activated(activation, outputs)
        return outputs if activation is None else activation(outputs)

    def _activated(self, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Applies an activation, whose result tells the layer behind it how it was made."""
        if not _may_repeat(inputs):
            return function(inputs)
        graph = tf.compat.v1.get_default_graph()
        begin = len(graph.get_operations())
        outputs = Part(f"the activation of {self._path!r}", function, self._owner)(inputs)
        # A second draw of random numbers would differ from the first.
        if isinstance(outputs, tf.Tensor) and not is_stateful(graph, begin):
            setattr(outputs, _MADE_OF, (function, inputs))
        return outputs

    @contextmanager
    def _activation(self, function: Callable[[Any], Any] | None) -> Iterator[None]:
        """Gives the layer another activation for a block, past Keras' attribute tracking."""
        before = self._owner.activation
        object.__setattr__(self._owner, "activation", function)
        try:
            yield
        finally:
            object.__setattr__(self._owner, "activation", before)


def _may_repeat(inputs: Any) -> bool:
    """Whether a gradient is expected, and can be customized: TensorFlow cannot inside of loops."""
    return is_differentiated(inputs) and not in_while_loop_defun(tf.compat.v1.get_default_graph())


def _has_activation(operation: keras.Operation) -> bool:
    """Whether a layer or an operation has an activation that keeps more than its output."""
    if isinstance(operation, _OPERATIONS):
        return True
    function = vars(operation).get("activation")
    return callable(function) and function not in _OUTPUT_SUFFICES and not isinstance(function, keras.Layer)
