"""Operations of a traced step, each with its layer and the line of the user's code that made it."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt.internals.patches import patched

_TFOPT = f"{Path(__file__).parents[1]}{os.sep}"
# Frames outside these called tfopt; they are not part of the model.
_TRACERS = tuple(f"{_TFOPT}{folder}{os.sep}" for folder in ("xla", "model", "measure"))
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_LIBRARIES = (_TFOPT, f"{Path(keras.__file__).parent}{os.sep}", f"{tf.sysconfig.get_lib()}{os.sep}")


class TracedOperation(NamedTuple):
    """An operation of a graph or of a function in it."""

    operation: tf.Operation
    layer: str | None
    """Path of its layer; None outside all layers."""
    line: str | None
    """File and line of the user's code that made it, or whose gradient it computes: "/home/me/net.py:41". None if only
    Keras and TensorFlow took part."""


@contextmanager
def recorded_scopes() -> Iterator[dict[str, keras.Layer]]:
    """Records which layer opens which name scope during a trace.

    A scope's name is ambiguous: Keras opens each scope twice and TensorFlow numbers the second, so `dense_1` may belong
    to layer `dense` or to one called `dense_1`.
    """
    layers: dict[str, keras.Layer] = {}

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def opened(layer: keras.Layer) -> Iterator[Any]:
            with original(layer) as scope:
                layers[tf.get_current_name_scope()] = layer
                yield scope

        return opened

    with patched(keras.layers.Layer, "_open_name_scope", recording, by="xla.explain"):
        yield layers


def traced_operations(graph: tf.Graph, scopes: Mapping[str, keras.Layer]) -> Iterator[TracedOperation]:
    """Yields every operation of a graph and of the functions in it: loops, branches, gradients.

    A function belongs to the layer that calls it.
    """
    callers: dict[str, str | None] = {}
    pending: list[tuple[Any, str | None]] = [(graph, None)]
    while pending:
        current, caller = pending.pop()
        operations = current.get_operations()
        lines = {operation.name: _line_of(operation) for operation in operations}
        for operation in operations:
            layer = layer_of(operation.name, scopes) or caller
            functions = {name: graph._get_function(name) for name in _named_functions(operation.node_def)}
            for name in sorted(functions.keys() - callers.keys()):
                if functions[name] is None:
                    continue
                # A function's gradient is called outside all scopes.
                forward = functions[name].definition.attr["forward_function_name"].s.decode()
                callers[name] = layer or callers.get(forward)
                pending.append((functions[name].graph, callers[name]))
            # A placeholder is an argument of the step, not an operation.
            if operation.type != "Placeholder":
                yield TracedOperation(operation, layer, _forward_line(operation, lines))


def layer_of(node: str, scopes: Mapping[str, keras.Layer]) -> str | None:
    """Returns the path of the innermost layer in whose scope a node, or the gradient of one, lies."""
    parts = node.removeprefix("gradient_tape/").split("/")
    for length in range(len(parts) - 1, 0, -1):
        layer = scopes.get("/".join(parts[:length]))
        if layer is not None:
            return layer.path or layer.name
    return None


def _named_functions(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name:
                yield function.name


def _forward_line(operation: tf.Operation, lines: Mapping[str, str | None]) -> str | None:
    """The line of an operation; for a gradient, that of the forward operation, not of the call that asked for it."""
    forward = getattr(operation, "_original_op", None)
    if forward is not None:
        return _line_of(forward)
    own = lines[operation.name]
    if not operation.name.startswith("gradient_tape/"):
        return own
    # Operations of a gradient are named for the forward operation's scope and, mostly, type: "CropAndResizeGradImage".
    scope, _, name = operation.name.removeprefix("gradient_tape/").rpartition("/")
    near = [one for one in lines if one.rpartition("/")[0] == scope and lines[one]]
    kind = name.partition("Grad")[0].partition("_")[0]
    same = [one for one in near if one.rpartition("/")[2].startswith(kind)]
    return next((lines[one] for one in (*same, *near)), own)


def _line_of(operation: tf.Operation) -> str | None:
    """The innermost line outside Keras, TensorFlow and tfopt that made an operation."""
    for frame in reversed(operation.traceback or ()):
        file = os.path.abspath(frame.filename)
        if file.startswith(_TRACERS):
            return None  # the rest is the user's call of tfopt
        standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        if not standard and not file.startswith(_LIBRARIES):
            return f"{frame.filename}:{frame.lineno}"
    return None
