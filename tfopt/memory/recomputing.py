"""Gradient checkpointing: switches it on and off for a model, within a budget if there is one."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import keras

from tfopt import checks
from tfopt.errors import UnsupportedError
from tfopt.internals.layers import Functional
from tfopt.kernels.replacing import renew
from tfopt.memory.estimating import estimate
from tfopt.memory.recomputation.activations import Activations
from tfopt.memory.recomputation.choosing import Chosen, SegmentedGraph, automatic, named
from tfopt.memory.recomputation.rerunning import Part
from tfopt.model.layers import CALL_METHODS, is_built, layer_paths, layers_and_graphs, require_model
from tfopt.text import figure

_ATTRIBUTE = "_tfopt_recomputed"
_ABSENT = object()


class _Replaced(NamedTuple):
    """A method of a layer that was replaced."""

    name: str
    function: Any
    before: Any
    """What the layer itself had under that name."""


def recompute(
    model: keras.Model,
    layers: Literal["auto", "activations"] | Iterable[str | keras.Layer] = "auto",
    *,
    budget_mib: float | None = None,
    batch: Any = None,
) -> int:
    """Trains in less memory: activations are computed again in the backward pass instead of being kept until then.

    Use it, before or after `compile`, for a model or a batch that does not fit into the GPU's memory. Each block keeps
    only its inputs, and its forward pass runs twice, so that a step takes up to a third longer. Training is the same up
    to rounding, with and without XLA: dropout draws the same mask again, and batch normalization updates its averages
    once.

    "auto" takes blocks that repeat: layers of one class that hold other layers, such as those of a transformer, which
    feed each other in a Functional model or are attributes of one layer in a subclassed one. A Functional or Sequential
    model without them is divided into segments where little crosses, about √n of n equal layers. The last segment keeps
    its activations, since its gradient comes first.

    "activations" takes the functions that Keras' layers apply to each element, such as GELU, SiLU and Mish. Only their
    input is kept, not their intermediate values or the input of the dense layer or convolution that follows. Try it
    first, since it costs little time. For ReLU and the like, only the output is kept anyway.

    Only traced gradients take less memory: `fit`, `train_on_batch` or a tf.function of your own. Eager calls,
    `evaluate` and `predict` compute as before. Saved and cloned models lose it: call it again on a loaded model. A
    second call replaces the first.

    Args:
        model: A built model, compiled or not.
        layers: "auto", "activations", or names, paths or layers, each of which is computed again from its inputs.
        budget_mib: The most MiB that a training step may take in all, as `estimate` counts them. As few blocks or
            segments as possible are computed again, from the first on. The step is traced, and under XLA compiled, a
            few times to find out. Default: all of them.
        batch: One batch (x, y[, sample_weight]) or its specs, as `estimate` takes it. Only with a budget.

    Returns:
        How many blocks, segments or activations are computed again.

    Raises:
        TypeError: If `model` is not a Keras model, or `layers` holds anything but names and layers.
        ValueError: If the model is not built, a layer is not in it or lies inside another one of `layers`, "auto" finds
            neither blocks nor segments, "activations" finds none that keeps more than its output, or the step takes
            more than the budget even so. Also if there is a budget without a batch or a batch without a budget, or a
            budget and the model is not compiled.
        tfopt.errors.UnsupportedError: If the model runs eagerly, or a layer's method has been replaced on top of an
            earlier `recompute`. While a step is traced: if a second run would differ, because a layer draws with
            tf.random, changes a tf.Variable or a trainable weight, assigns inside a loop or synchronizes replicas, or
            if it uses a tensor that is no argument of its call.

    Example:
        >>> tfopt.memory.recompute(model)
        12
    """
    require_model(model)
    _require_built(model, model)
    if model.run_eagerly:
        raise UnsupportedError(
            f"Expected a model whose training step is traced. Found {model.name!r} with run_eagerly=True. Compile it "
            "with run_eagerly=False."
        )
    if budget_mib is None and batch is not None:
        raise ValueError(
            "Expected budget_mib along with a batch, which is needed only to keep within it. Received: none. Pass "
            "budget_mib, or leave out the batch."
        )
    chosen = _chosen(model, layers)
    for part in chosen:
        _require_built(model, part)
    count = sum(map(_most, chosen))
    if budget_mib is not None:
        budget = checks.number("budget_mib", budget_mib, "Give the MiB that a step may take.", above=0)
        count = _fewest(model, chosen, budget, batch)
    _install(model, chosen, count)
    renew(model)
    return count


def undo(model: keras.Model) -> int:
    """Keeps a model's activations again, and returns how many parts change; 0 if none was recomputed.

    Raises:
        TypeError: If `model` is not a Keras model.
        tfopt.errors.UnsupportedError: If a layer's method has been replaced again since. Then nothing changes.

    Example:
        >>> tfopt.memory.undo(model)
        12
    """
    require_model(model)
    count = _remove(model)
    if count:
        renew(model)
    return count


def is_recomputed(model: keras.Model) -> bool:
    """Whether any part of a model is computed again in the backward pass."""
    return bool(_changed(model))


def _chosen(model: keras.Model, layers: Any) -> list[Chosen]:
    if isinstance(layers, str) and layers == "activations":
        return [Activations(model)]
    return automatic(model) if isinstance(layers, str) and layers == "auto" else named(model, layers)


def _changed(model: keras.Model) -> list[keras.Operation]:
    """The layers, graphs and operations of which a method has been replaced."""
    parts: list[keras.Operation] = list(layers_and_graphs(model))
    operations = [one for part in parts if isinstance(part, Functional) for one in part._operations]
    return [one for one in dict.fromkeys(parts + operations) if _ATTRIBUTE in vars(one)]


def _fewest(model: keras.Model, chosen: Sequence[Chosen], budget: float, batch: Any) -> int:
    """How many parts must be computed again for a step to stay within the budget; the model stays as it is."""
    if batch is None:
        raise ValueError(
            "Expected a batch along with budget_mib, since activations grow with it. Received: none. Pass "
            "batch=(x, y), arrays or their specs."
        )
    takes: dict[int, float] = {}

    def fits(count: int) -> bool:
        _install(model, chosen, count)
        takes[count] = estimate(model, batch).total_mib
        return takes[count] <= budget

    every = sum(map(_most, chosen))
    with _restored(model):
        count = bisect_left(range(every + 1), True, key=fits)
    if count > every:
        raise ValueError(
            f"Expected a budget that a training step can stay within. Received: {budget:g} MiB, where it takes "
            f"{figure(min(takes.values()))} MiB even if all is computed again. Raise it, or make the batch smaller."
        )
    return count


@contextmanager
def _restored(model: keras.Model) -> Iterator[None]:
    """Lets the parts compute again at the end of the block that do so at its beginning, and no others."""
    before = {one: vars(one)[_ATTRIBUTE] for one in _changed(model)}
    try:
        yield
    finally:
        _remove(model)
        for changed, replaced in before.items():
            for one in replaced:
                _replace(changed, one.name, one.function)


def _install(model: keras.Model, chosen: Sequence[Chosen], count: int) -> None:
    """Lets the first parts compute again, and no others."""
    _remove(model)
    paths = layer_paths(model)
    for part in chosen:
        first = min(count, _most(part))
        count -= first
        if first and isinstance(part, SegmentedGraph):
            part.count = first
            _replace(part.graph, "_run_through_graph", part)
        elif first and isinstance(part, Activations):
            part.count = first
            for owner, call in part.calls().items():
                _replace(owner, "call", call)
        elif first:
            for name in CALL_METHODS:
                _replace(part, name, Part(f"layer {paths[part]!r}", getattr(part, name), part))


def _most(part: Chosen) -> int:
    return 1 if isinstance(part, keras.Layer) else part.most


def _remove(model: keras.Model) -> int:
    changed = _changed(model)
    for one in changed:
        for name, function, _ in vars(one)[_ATTRIBUTE]:
            if vars(one).get(name) is not function:
                path = getattr(one, "path", None) or one.name
                raise UnsupportedError(
                    f"Expected {name!r} of layer {path!r} as tfopt.memory left it. Found another "
                    "patch on top of it. Remove that patch first."
                )
    count = 0
    for one in changed:
        replaced = vars(one)[_ATTRIBUTE]
        count += getattr(replaced[0].function, "count", 1)
        for name, _, before in replaced:
            if before is _ABSENT:
                object.__delattr__(one, name)
            else:
                object.__setattr__(one, name, before)
        object.__delattr__(one, _ATTRIBUTE)
    return count


def _replace(one: keras.Operation, name: str, function: Any) -> None:
    """Replaces a method of one layer, past Keras' attribute tracking, which would save what the function refers to."""
    before = vars(one).get(name, _ABSENT)
    object.__setattr__(one, name, function)
    object.__setattr__(one, _ATTRIBUTE, (*vars(one).get(_ATTRIBUTE, ()), _Replaced(name, function, before)))


def _require_built(model: keras.Model, part: Chosen) -> None:
    if isinstance(part, keras.Layer) and not is_built(part):
        raise ValueError(
            f"Expected a built model. Received: {model.name!r}, whose layer {part.name!r} has no weights yet. "
            "Call the model on one batch first."
        )
