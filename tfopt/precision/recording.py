"""What goes into every layer of a model and comes out of it, noted while the model is traced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.model.outputs import calls_wrapped


class LayerCall(NamedTuple):
    """One call of a layer: the floating-point tensors that went in and came out."""

    layer: keras.Layer
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


@contextmanager
def recording(model: keras.Model, watch: Callable[[list[tf.Tensor]], None]) -> Iterator[list[LayerCall]]:
    """Notes the calls of a model's layers, in the order in which they end, while a function is traced.

    Calls inside a loop or a function of their own (an RNN's cell) are left out: their tensors cannot be read from
    outside. So is a model whose outputs are those of a layer inside it.

    Args:
        model: The model. Nested layers are noted, too.
        watch: Called with the tensors of each call, for a gradient tape.

    Yields:
        The list that the calls are added to.
    """
    graph = tf.compat.v1.get_default_graph()
    calls: list[LayerCall] = []

    def note(layer: keras.Layer, inputs: Any, outputs: Any) -> None:
        if tf.compat.v1.get_default_graph() is not graph:
            return
        call = LayerCall(layer, floating(inputs), floating(outputs))
        if isinstance(layer, keras.Model):
            known = {id(tensor) for one in calls for tensor in one.outputs}
            if all(id(tensor) in known for tensor in call.outputs):
                return
        watch(call.inputs + call.outputs)
        calls.append(call)

    def noted(layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = method(*args, **kwargs)
            note(layer, (args, kwargs), outputs)
            return outputs

        return call

    with calls_wrapped(model._flatten_layers(), noted):
        yield calls


def floating(values: Any) -> list[tf.Tensor]:
    """The dense floating-point tensors in a nest of anything."""
    tensors = keras.tree.flatten(values)
    return [tensor for tensor in tensors if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating]
