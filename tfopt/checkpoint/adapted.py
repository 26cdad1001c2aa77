"""What layers have learned from data before the training: vocabularies, moments, bins. Weights fit no others."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import keras
import numpy as np

from tfopt.errors import CheckpointError
from tfopt.internals.layers import IndexLookup
from tfopt.pipelines.plan import plan_of
from tfopt.pipelines.shared.options import StageFunction
from tfopt.pipelines.stages.stage import all_of
from tfopt.text import listed

PREFIX = "adapted/"
"""How the names of their arrays begin."""

_MODEL, _DATA = f"{PREFIX}model/", f"{PREFIX}data/"
# Moments of the same data in another order differ by rounding.
_CLOSE = 1e-3
_SHOWN = 8


def adapted(model: keras.Model, dataset: Any = None) -> dict[str, np.ndarray]:
    """Returns what the layers of a model have adapted, and those in the functions of a `build_pipeline` dataset.

    A model's layers are numbered, since Keras names them anew where it is built again.
    """
    found: dict[str, np.ndarray] = {}
    states = ((layer.name, state) for layer in model._flatten_layers() if (state := _state(layer)))
    for number, (name, state) in enumerate(states):
        found |= {f"{_MODEL}{number}/{what}/{name}": value for what, value in state.items()}
    for layer in _in_pipeline(dataset):
        found |= {f"{_DATA}{what}/{layer.name}": value for what, value in _state(layer).items()}
    return found


def require_same_adapted(
    own: Mapping[str, np.ndarray], saved: Mapping[str, np.ndarray], where: str, *, whole: bool = True
) -> None:
    """Raises CheckpointError if layers have adapted something else than those of a checkpoint; each one is named.

    Of functions of the data, and of a model that need not be the `whole` one, only the layers that are found in both
    are compared. Checkpoints of earlier versions hold nothing to compare.
    """
    if found := differences(own, saved, whole=whole):
        raise CheckpointError(
            f"Expected layers adapted to the same data as those of {where}. Found: {listed(found, _SHOWN)}. The "
            "weights would be used for other tokens or scales. Give the layers the vocabulary, moments or bins of that "
            "training: keep them in a file, or save the adapted layers; or use another folder."
        )


def differences(own: Mapping[str, np.ndarray], saved: Mapping[str, np.ndarray], *, whole: bool = True) -> list[str]:
    """Returns in which layers two mappings that `adapted` returned differ; see `require_same_adapted`."""
    of_model = [sum(name.startswith(_MODEL) for name in each) for each in (own, saved)]
    if not whole and of_model[0] != of_model[1]:  # numbered otherwise: by their names, then
        own, saved = (
            {
                f"{_DATA}{'/'.join(name.split('/')[-2:])}" if name.startswith(_MODEL) else name: each[name]
                for name in each
            }
            for each in (own, saved)
        )
    ours, theirs = (
        {name.rpartition("/")[0] if name.startswith(_MODEL) else name: name for name in each if name.startswith(PREFIX)}
        for each in (own, saved)
    )
    found = []
    for key in dict.fromkeys([*ours, *theirs]) if theirs else ():
        what, layer = ours.get(key, theirs.get(key, "")).split("/")[-2:]
        if key in ours and key in theirs:
            fault = _difference(what, own[ours[key]], np.asarray(saved[theirs[key]]))
            found += [f"the {what} of {layer!r}: {fault}"] if fault else []
        elif key.startswith(_MODEL):
            found.append(f"the {what} of {layer!r} only {'here' if key in ours else 'in the checkpoint'}")
    return found


def _difference(what: str, own: np.ndarray, saved: np.ndarray) -> str:
    """Says in what two states differ; "" if they do not."""
    if own.dtype.kind != "f":
        ours, theirs = (json.loads(value.tobytes()) for value in (own, saved))
        if ours == theirs:
            return ""
        pairs = enumerate(zip([*ours, None], [*theirs, None], strict=False))
        at, (one, other) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        return f"{len(ours):,} entries here, {len(theirs):,} in the checkpoint; at {at}, {one!r} here, {other!r} there"
    if own.shape != saved.shape:
        return f"shape {own.shape} here, {saved.shape} in the checkpoint"
    scale = np.sqrt(np.abs(saved[1:])) if what == "moments" else 0.0
    far = np.abs(own - saved) > _CLOSE * np.maximum(scale, np.abs(saved))
    if not far.any():
        return ""
    first = tuple(np.argwhere(far)[0])
    return f"{np.count_nonzero(far):,} of {far.size:,} numbers; {own[first]:g} here, {saved[first]:g} in the checkpoint"


def _state(layer: Any) -> dict[str, np.ndarray]:
    """What a layer has adapted, or was given in its place, by the field's term."""
    if isinstance(layer, IndexLookup):
        found = {"vocabulary": _text(map(str, layer.get_vocabulary()))}
        weights = getattr(layer, "idf_weights_const", None)
        return found if weights is None else found | {"tf-idf weights": np.asarray(weights, np.float64)}
    if isinstance(layer, keras.layers.Normalization):
        moments = (layer.mean, layer.variance)
        return {} if layer.mean is None else {"moments": np.stack([_numbers(each) for each in moments])}
    if isinstance(layer, keras.layers.Discretization):
        return {"bins": np.asarray(layer.bin_boundaries or [], np.float64)}
    if isinstance(layer, keras.layers.Hashing):
        return {"hashing": _text([layer.num_bins, layer.mask_value, layer.salt])}
    return {}


def _text(values: Iterable[Any]) -> np.ndarray:
    return np.frombuffer(json.dumps([*values]).encode(), np.uint8)


def _numbers(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value), np.float64)


def _in_pipeline(dataset: Any) -> Iterator[Any]:
    """The layers with a state in the functions of a pipeline, each once."""
    plan = plan_of(dataset)
    if plan is None:
        return
    options = [plan.options, *(part.options for part in all_of(plan.stages) if hasattr(part, "options"))]
    functions = [
        function
        for each in options
        for function in (each.transform, *(each.augment if isinstance(each.augment, list | tuple) else [each.augment]))
    ]
    yield from {id(layer): layer for function in functions for layer in _layers_in(function)}.values()


def _layers_in(function: Any) -> Iterator[Any]:
    """The layers that a function is, is a method of, or refers to by name."""
    if isinstance(function, StageFunction):
        function = function.call
    named = [function, getattr(function, "layer", None), getattr(function, "__self__", None)]
    if isinstance(function, partial):
        yield from _layers_in(function.func)
        named += [*function.args, *function.keywords.values()]
    function = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(function):
        with suppress(ValueError):  # a variable that has no value yet
            found = inspect.getclosurevars(function)
            named += [*found.nonlocals.values(), *found.globals.values()]
    for value in named:
        if isinstance(value, keras.layers.Layer):
            yield from value._flatten_layers()
