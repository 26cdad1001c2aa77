"""States of callbacks: the counters of Keras' own, and what `get_state` of others returns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfopt.checkpoint.folder.manifest import as_json
from tfopt.warn import warn_once

PREFIX = "callbacks/"
"""How the names of their arrays begin."""

_ARRAY, _NUMBER = "__array__", "__number__"  # the keys of marks
# The attributes of Keras' callbacks that change during a training and that `on_train_begin` does not set.
_ATTRIBUTES: dict[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
    keras.callbacks.History: ("history", "epoch"),
}

State = tuple[dict[str, Any], dict[str, np.ndarray]]
"""JSON values, and arrays by name."""


def save(callbacks: Sequence[keras.callbacks.Callback]) -> State:
    """Returns the states of callbacks.

    Raises:
        TypeError: If a callback's `get_state` returns something other than JSON values and arrays.
    """
    values: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, callback in _named(callbacks):
        state = _state(callback)
        if state is not None:
            try:
                values[name] = as_json({"state": _without_arrays(state, f"{PREFIX}{name}", arrays)})["state"]
            except TypeError as error:
                raise TypeError(
                    f"Expected {name}.get_state() to return JSON values and NumPy arrays. Found: "
                    f"{error.__cause__ or error}. Return numbers, strings, lists, dicts with string keys, and arrays."
                ) from error
    return values, arrays


def restore(
    callbacks: Sequence[keras.callbacks.Callback], values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Restores the states that `save` returned, and warns of states without a callback in the list."""
    named = dict(_named(callbacks))
    missing = [name for name in values if name not in named]
    if missing:
        warn_once(
            f"callbacks {missing}",
            f"Expected the callbacks of the checkpoint. Found that {', '.join(missing)} is missing from fit's list: "
            "its saved state is dropped. Pass the same callbacks to go on exactly.",
        )
    for name, value in values.items():
        if name in named:
            _put(named[name], _with_arrays(value, arrays))


def _named(callbacks: Iterable[keras.callbacks.Callback]) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Each callback under the name of its class; the second of a class with a number."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name}#{counts[name]}", callback


def _own(callback: Any) -> tuple[str, ...] | None:
    """The attributes that are a callback's state; None if it has `get_state` and `set_state`."""
    if callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None)):
        return None
    known = (names for kind, names in _ATTRIBUTES.items() if isinstance(callback, kind))
    return tuple(name for name in next(known, ()) if hasattr(callback, name))


def _state(callback: Any) -> Any:
    """The state of a callback; None if it has none that is known."""
    names = _own(callback)
    return callback.get_state() if names is None else {name: getattr(callback, name) for name in names} or None


def _put(callback: Any, state: Any) -> None:
    names = _own(callback)
    if names is None:
        callback.set_state(state)
        return
    for name in names:
        if name in state:  # not in that of an earlier Keras
            setattr(callback, name, state[name])


def _without_arrays(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """A value with a mark in place of each array, which goes into `arrays`, and of each number of NumPy's."""
    if isinstance(value, Mapping):
        return {key: _without_arrays(each, f"{name}/{key}", arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(each, f"{name}/{number}", arrays) for number, each in enumerate(value)]
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    if isinstance(value, np.generic):
        return {_NUMBER: [value.dtype.name, value.item()]}
    if isinstance(value, np.ndarray):
        arrays[name] = np.array(value)  # as it is now
        return {_ARRAY: name}
    return value


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if list(value) == [_ARRAY]:
            return np.array(arrays[value[_ARRAY]])
        if list(value) == [_NUMBER]:
            dtype, number = value[_NUMBER]
            return np.dtype(dtype).type(number)
        return {key: _with_arrays(each, arrays) for key, each in value.items()}
    return [_with_arrays(each, arrays) for each in value] if isinstance(value, list) else value
