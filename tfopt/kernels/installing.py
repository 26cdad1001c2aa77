"""Kernels put in the place of single layers' methods, told apart from Keras' own, and taken back."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tfopt.errors import UnsupportedError
from tfopt.model.require import require_model

Explainer = Callable[[keras.Layer, bool], "LayerPath | None"]
_explainers: list[Explainer] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPath:
    """How one layer computes: through a kernel, or on Keras' own path.

    Attributes:
        layer: The layer's path.
        kernel: What the kernel is, such as "flash attention".
        training: What keeps the layer on Keras' path while training; empty where it takes the kernel, None where that
            is known only once a step was traced.
        inference: The same for `evaluate` and `predict`.
    """

    layer: str
    kernel: str
    training: tuple[str, ...] | None
    inference: tuple[str, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.training == self.inference:
            return f"{self.layer}: {self._words(self.training)}"
        return f"{self.layer}: training {self._words(self.training)}; inference {self._words(self.inference)}"

    def _words(self, obstacles: tuple[str, ...] | None) -> str:
        if obstacles is None:
            return f"{self.kernel} if a step's shapes and masks allow (not traced yet)"
        return f"plain ({', '.join(obstacles)})" if obstacles else self.kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which layers of a model take a kernel, and what keeps the others on Keras' path.

    Attributes:
        layers: A row for each layer that a kernel is there for.
    """

    layers: tuple[LayerPath, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {"layers": [layer.to_dict() for layer in self.layers]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers)) or "The model has no layer that a kernel is there for."


def explain(model: keras.Model) -> Explanation:
    """Tells which layers of a model run through a kernel, and what keeps the others on Keras' path.

    Use it after the first step of `fit`: shapes and masks are known only once a step was traced. Before that, it names
    what stands against a kernel whatever the batch. It says what the last trace found, and traces nothing itself.

    Args:
        model: A model, changed by `use_flash_attention` or `fuse_batch_norm` or not.

    Returns:
        A row for each layer that a kernel is there for, inside other layers and models too.

    Raises:
        TypeError: `model` is no Keras model.

    Example:
        >>> print(tfopt.kernels.explain(model))
        decoder/attention: training flash attention; inference plain (a batch of no fixed size)
    """
    require_model(model)
    rows = (explainer(layer, model.jit_compile) for layer in _in_order(model, set()) for explainer in _explainers)
    return Explanation(layers=tuple(row for row in rows if row))


def undo(model: keras.Model) -> int:
    """Gives a model's layers their own methods back, whichever kernels they had.

    Args:
        model: A model.

    Returns:
        How many layers changed.

    Raises:
        TypeError: `model` is no Keras model.
        tfopt.errors.UnsupportedError: Somebody else has replaced a layer's method since. Nothing is changed then.

    Example:
        >>> tfopt.kernels.undo(model)
        12
    """
    require_model(model)
    return restore(model)


def explained_by(explainer: Explainer) -> Explainer:
    """Has `explain` ask this function about each layer, and whether the model runs under XLA.

    It returns the layer's row, or None for a layer that its kernel is not there for. Each kernel has one.
    """
    _explainers.append(explainer)
    return explainer


class Traced:
    """What kept a layer from its kernel in each call of the last trace: a model may call one layer twice."""

    def __init__(self) -> None:
        self._graphs: dict[bool, weakref.ref[Any]] = {}
        self._calls: dict[bool, list[tuple[str, ...]]] = {}

    def note(self, training: Any, obstacles: tuple[str, ...]) -> None:
        """Keeps what a call found; nothing where Keras only asks for the shape of an output, to build a model."""
        if in_symbolic_scope():
            return
        training, graph = bool(training), tf.compat.v1.get_default_graph()
        known = self._graphs.get(training)
        if tf.executing_eagerly() or known is None or known() is not graph:
            self._calls[training] = []
        self._graphs[training] = weakref.ref(graph)
        self._calls[training].append(obstacles)

    def last(self, training: bool, standing: Iterable[str]) -> tuple[str, ...] | None:
        """As last traced, else what stands against the kernel whatever the batch, else None: not known."""
        calls = self._calls.get(training)
        if calls is None:
            return tuple(standing) or None
        found = dict.fromkeys(obstacle for call in calls for obstacle in call)
        return tuple(found if all(calls) else (f"in some calls: {obstacle}" for obstacle in found))


def replace_each(
    model: keras.Model, layers: Sequence[keras.Layer], name: str, make: Callable[[keras.Layer], Callable[..., Any]]
) -> int:
    """Puts what `make` makes of each layer in the place of its method, and returns how many layers that were."""
    for layer in layers:
        replace(layer, name, make(layer))
    if layers:
        renew(model)
    return len(layers)


def replace(layer: keras.Layer, name: str, function: Callable[..., Any]) -> None:
    """Puts a function in the place of a method of this one layer: neither its class nor other layers change.

    Call `renew` once all of a model's layers are done, as `replace_each` does. The function gets what the method got,
    without the layer; the method itself stays at hand as `getattr(type(layer), name)`.

    Args:
        layer: The layer.
        name: The method's name, such as "call". At most one kernel replaces a layer's method.
        function: What to call instead. Keras neither tracks nor saves it.
    """
    # Not through Keras' __setattr__, which would track what the function refers to.
    object.__setattr__(layer, name, function)
    object.__setattr__(layer, "_tfopt_replaced", (*_replaced(layer), (name, function)))


def replacement(layer: keras.Layer, name: str) -> Callable[..., Any] | None:
    """What `replace` has put in the place of a layer's method, or None."""
    return dict(_replaced(layer)).get(name)


def restore(model: keras.Model) -> int:
    """Takes back all that `replace` did to a model's layers, and returns how many layers that were."""
    layers = [layer for layer in model._flatten_layers() if _replaced(layer)]
    for layer in layers:
        for name, function in _replaced(layer):
            if vars(layer).get(name) is not function:
                raise UnsupportedError(
                    f"Expected {name!r} of layer {layer_path(layer)} as tfopt.kernels left it. Found another patch on "
                    "top of it. Remove that one first."
                )
    for layer in layers:
        for name, _ in _replaced(layer):
            object.__delattr__(layer, name)
        object.__delattr__(layer, "_tfopt_replaced")
    if layers:
        renew(model)
    return len(layers)


def renew(model: keras.Model) -> None:
    """Makes a model's step functions anew, which `fit`, `evaluate` and `predict` would keep as they traced them first.

    Those of the models inside it too: each can be fitted by itself. A callback may ask for it while `fit` runs.
    """
    for part in model._flatten_layers():
        if isinstance(part, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                if getattr(part, name) is not None:
                    # Not `force=True`, which a maker of the user's own need not take.
                    setattr(part, name, None)
                    getattr(part, f"make_{name}")()


def layer_path(layer: keras.Layer) -> str:
    """The name by which a layer is called in errors and explanations."""
    return layer.path or layer.name


def _in_order(layer: keras.Layer, seen: set[int]) -> Iterator[keras.Layer]:
    """A layer and every one inside it, once; Keras' own walk turns the order of nested ones round."""
    if id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        for part in layer._flatten_layers(include_self=False, recursive=False):
            yield from _in_order(part, seen)


def _replaced(layer: keras.Layer) -> tuple[tuple[str, Callable[..., Any]], ...]:
    return vars(layer).get("_tfopt_replaced", ())
