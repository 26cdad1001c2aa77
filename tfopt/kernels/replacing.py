"""Replaces methods of single layers by kernels, and restores Keras' own."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.scopes import in_symbolic_scope
from tfopt.model.layers import require_model
from tfopt.model.state import STEP_FUNCTIONS, rebuild_step_function

CALLS_OWN = "_tfopt_calls_own"
"""An attribute of functions set on a model by floors above: that they call the class's own method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPath:
    """How one layer computes: through a kernel, or on Keras' own path."""

    layer: str
    """The layer's path."""
    kernel: str
    """The kernel's name, such as "flash attention"."""
    training: tuple[str, ...] | None
    """What keeps the layer on Keras' path in training; empty if it uses the kernel, None until a step is traced."""
    inference: tuple[str, ...] | None
    """The same for `evaluate` and `predict`."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.training == self.inference:
            return f"{self.layer}: {self._describe(self.training)}"
        return f"{self.layer}: training {self._describe(self.training)}; inference {self._describe(self.inference)}"

    def _describe(self, obstacles: tuple[str, ...] | None) -> str:
        if obstacles is None:
            return f"{self.kernel} if a step's shapes and masks allow (not traced yet)"
        return f"plain ({', '.join(obstacles)})" if obstacles else self.kernel


class Traced:
    """What kept a layer from its kernel in each call of the last trace; a model may call a layer several times."""

    def __init__(self) -> None:
        self._graphs: dict[bool, weakref.ref[Any]] = {}
        self._calls: dict[bool, list[tuple[str, ...]]] = {}

    def note(self, training: Any, obstacles: tuple[str, ...]) -> None:
        """Records what a call found, unless Keras is only computing an output's shape to build a model."""
        if in_symbolic_scope():
            return
        training, graph = bool(training), tf.compat.v1.get_default_graph()
        known = self._graphs.get(training)
        if tf.executing_eagerly() or known is None or known() is not graph:
            self._calls[training] = []
        self._graphs[training] = weakref.ref(graph)
        self._calls[training].append(obstacles)

    def last(self, training: bool, standing: Iterable[str]) -> tuple[str, ...] | None:
        """What was last traced, otherwise what rules out the kernel for any batch; None if unknown."""
        calls = self._calls.get(training)
        if calls is None:
            return tuple(standing) or None
        found = dict.fromkeys(obstacle for call in calls for obstacle in call)
        return tuple(found if all(calls) else (f"in some calls: {obstacle}" for obstacle in found))


def replace_each(
    model: keras.Model, layers: Sequence[keras.Layer], name: str, make: Callable[[keras.Layer], Callable[..., Any]]
) -> int:
    """Replaces a method of each layer with what `make` returns for it, and returns how many layers changed."""
    for layer in layers:
        replace(layer, name, make(layer))
    if layers:
        renew(model)
    return len(layers)


def replace(layer: keras.Layer, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method, such as "call", of this one layer; its class and other layers do not change.

    Call `renew` once all of a model's layers are done, as `replace_each` does. The function gets the method's arguments
    without the layer; the method itself remains available as `getattr(type(layer), name)`.
    """
    # Not Keras' __setattr__, which would track and save what the function refers to.
    object.__setattr__(layer, name, function)
    object.__setattr__(layer, "_tfopt_replaced", (*_replaced(layer), (name, function)))


def replacement(layer: keras.Layer, name: str) -> Callable[..., Any] | None:
    """Returns the replacement of a layer's method, or None."""
    return dict(_replaced(layer)).get(name)


def replacements(layer: keras.Layer) -> dict[str, Callable[..., Any]]:
    """Returns the replacements of a layer's methods by name."""
    return dict(_replaced(layer))


def has_replacement(layer: keras.Layer) -> bool:
    """Whether any method of a layer is replaced."""
    return bool(_replaced(layer))


def renew(model: keras.Model) -> None:
    """Rebuilds the step functions of a model and of the models inside it. A callback may call it during `fit`."""
    for part in model._flatten_layers():
        if isinstance(part, keras.Model):
            for name in STEP_FUNCTIONS:
                rebuild_step_function(part, name)


def layer_path(layer: keras.Layer) -> str:
    """The layer's name in errors and explanations."""
    return layer.path or layer.name


def undo(model: keras.Model) -> int:
    """Removes all kernels from a model's layers, and returns how many layers changed.

    Raises:
        TypeError: If `model` is not a Keras model.
        tfopt.errors.UnsupportedError: If a layer's method has been replaced again since. Then nothing changes.

    Example:
        >>> tfopt.kernels.undo(model)
        12
    """
    require_model(model)
    layers = [layer for layer in model._flatten_layers() if _replaced(layer)]
    for layer in layers:
        for name, function in _replaced(layer):
            if vars(layer).get(name) is not function:
                raise UnsupportedError(
                    f"Expected {name!r} of layer {layer_path(layer)} as tfopt.kernels left it. Found another patch on "
                    "top of it. Remove that patch first."
                )
    for layer in layers:
        for name, _ in _replaced(layer):
            object.__delattr__(layer, name)
        object.__delattr__(layer, "_tfopt_replaced")
    if layers:
        renew(model)
    return len(layers)


def restorer(model: keras.Model) -> Callable[[], None]:
    """Returns what gives layers back the kernels, or Keras' own methods, that they have now."""
    before = {layer: _replaced(layer) for layer in model._flatten_layers()}

    def restore() -> None:
        undo(model)
        for layer, replaced in before.items():
            for name, function in replaced:
                replace(layer, name, function)
        renew(model)

    return restore


@contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Gives layers at the end of the block what they have at its beginning."""
    restore = restorer(model)
    try:
        yield
    finally:
        restore()


def _replaced(layer: keras.Layer) -> tuple[tuple[str, Callable[..., Any]], ...]:
    return vars(layer).get("_tfopt_replaced", ())
