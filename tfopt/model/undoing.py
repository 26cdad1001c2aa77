"""Takes back what a failure has left half made in a model: layers, metrics and optimizers that a trace was building."""

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import keras
import numpy as np

from tfopt.internals.layers import KerasSaveable, TrackableDataStructure, Tracker
from tfopt.internals.scopes import GLOBAL_SEEDS, global_seeds, set_state

_P = ParamSpec("_P")
_T = TypeVar("_T")
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, tuple)


def only_looks(verb: Callable[_P, _T]) -> Callable[_P, _T]:
    """Lets a function whose first argument is a model leave the model's objects as they were if it fails."""

    @functools.wraps(verb)
    def looking(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with undone_if_failed(args[0] if args else kwargs.get("model")):
            return verb(*args, **kwargs)

    return looking


@contextmanager
def undone_if_failed(model: Any) -> Iterator[None]:
    """Gives the objects of a model the attributes back that they had, if the block raises anything.

    A variable that a trace creates has no value until the trace ends. If it does not, Keras takes the optimizer for
    built all the same, and no later `fit` can run. The values of variables are not touched; `preserved` restores them.
    """
    before = list(_contents(model))
    seeds = random.getstate(), np.random.get_state(), global_seeds()
    try:
        yield
    except BaseException:  # Ctrl-C too
        for container, kind, content in before:
            _refill(container, kind, content)
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        set_state(GLOBAL_SEEDS, seeds[2])
        raise


def _contents(model: Any) -> Iterator[tuple[Any, type, Any]]:
    """The containers that Keras' objects of a model consist of, the attributes of each among them; kinds and copies."""
    seen: dict[int, Any] = {}
    pending = [model]
    while pending:
        one = pending.pop()
        if isinstance(one, KerasSaveable | Tracker) and not isinstance(one, keras.Variable | keras.KerasTensor):
            one = vars(one)
        elif issubclass(type(one), TrackableDataStructure):  # which pretends to be a list or a dict, and holds one
            pending.append(held := getattr(one, "__wrapped__", None))
            if isinstance(held, tuple):  # never refilled
                continue
            one = object.__getattribute__(one, "__dict__")
        kind = next((kind for kind in _CONTAINERS if issubclass(type(one), kind)), None)
        if kind is None or id(one) in seen:
            continue
        seen[id(one)] = one
        content = kind(one)
        if kind is not tuple:
            yield one, kind, content
        pending += content.values() if issubclass(kind, dict) else content


def _refill(container: Any, kind: Any, content: Any) -> None:
    """Puts the content back, past Keras' tracking."""
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    elif kind is list:
        list.extend(container, content)
    else:
        set.update(container, content)
