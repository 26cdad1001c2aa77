"""Refuses functions whose random draws TensorFlow's tracing would freeze.

Random functions of Python and NumPy leave no operation in a graph: they run once, when TensorFlow traces the function,
and their draw becomes a constant. A draw changes the state of its generator, which finds those of every generator that
can be found. The contents of two traces show most of the others, such as the time or a seed from the system.
"""

import functools
import inspect
import random
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

_MOST_VISITED = 5_000  # objects, in the search for generators
_MOST_ITEMS = 1_000  # of a container that is searched
_LEAST_PAUSE_SECONDS = 0.05
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A generator of random numbers that a function reaches, and its state when this was made."""

    name: str  # in the function
    generator: Any  # random.Random, np.random.Generator or np.random.RandomState
    state: Any

    def changed(self) -> bool:
        """Whether something has drawn from it since, or seeded it."""
        return _comparable(_read(self.generator)) != _comparable(self.state)

    def put_back(self) -> None:
        """Gives the generator this state."""
        if isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        elif isinstance(self.generator, np.random.RandomState):
            self.generator.set_state(self.state)
        else:
            self.generator.bit_generator.state = self.state


def generator_states(function: Any) -> list[GeneratorState]:
    """Returns the state of Python's and NumPy's global generators, and of those a function reaches.

    It reaches what lies in its globals, closure, default arguments and object, and in those of functions it calls, but
    not those of installed packages.
    """
    seen: dict[int, Any] = {}
    found = []
    # Both packages' functions are methods of a hidden generator.
    waiting = deque([("random", _owner(random.getstate)), ("np.random", _owner(np.random.get_state)), ("", function)])
    while waiting and len(seen) < _MOST_VISITED:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other object gets its id
        kind = type(value)  # isinstance() would make lazy modules import themselves
        if issubclass(kind, random.Random | np.random.Generator | np.random.RandomState):
            if not issubclass(kind, random.SystemRandom):  # it has no state
                found.append(GeneratorState(name, value, _read(value)))
        else:
            waiting.extend((own or name, part) for own, part in _parts(value))
    return found


def refuse_frozen_draws(
    stage: str, function: Any, trace: Callable[[], Any], first: Any, earlier: list[GeneratorState]
) -> None:
    """Refuses a function that draws from a generator while `trace` traces it again, or whose traces differ.

    Args:
        stage: For the error.
        function: What is traced.
        trace: Returns a new trace, a concrete function.
        first: The first trace. It may also build a Keras layer, make a table, or seed a generator.
        earlier: The states before the first trace, which an error puts back.

    Raises:
        ValueError: If there are such draws.
    """
    states, started = generator_states(function), time.monotonic()
    before, after = _contents(first), _contents(trace())
    drawn = [state for state in states if state.changed()]
    if drawn:
        # Other threads may draw, such as those of a dataset that is being read: then the contents alone must show it.
        resting = [GeneratorState(state.name, state.generator, _read(state.generator)) for state in drawn]
        time.sleep(max(_LEAST_PAUSE_SECONDS, time.monotonic() - started))
        drawn = [state for state in resting if not state.changed()]
    if before != after and not drawn:
        before, after = after, _contents(trace())
    if drawn or before != after:
        differing = " and then ".join(_shown(next(iter(only), None)) for only in (before - after, after - before))
        found = f"a draw from `{drawn[0].name}`" if drawn else differing
        own = {id(state.generator) for state in drawn}
        for state in (*states, *earlier):
            if id(state.generator) in own:
                state.put_back()
        raise ValueError(
            f"Expected {stage!r} to be the same whenever TensorFlow traces it. Found {found}: random numbers of "
            "Python or NumPy (or the time) are drawn once, when the pipeline is built, and that draw serves every "
            "element of every epoch. Draw in an `augment` with a keyword `seed` (int32, shape (2,)) and stateless "
            "operations, such as tf.random.stateless_uniform((), seed), or use tf.random instead."
        )


def nodes(function: Any) -> list[Any]:
    """Returns the nodes of a concrete function and of all functions it calls."""
    graph = function.graph.as_graph_def()
    return [*graph.node, *(node for nested in graph.library.function for node in nested.node_def)]


def _owner(method: Any) -> Any:
    return method.__self__


def _read(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    legacy = isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if legacy else generator.bit_generator.state


def _comparable(state: Any) -> list[Any]:
    return [leaf.tolist() if isinstance(leaf, np.ndarray) else leaf for leaf in tf.nest.flatten(state)]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a value holds, by name; "" for what goes by the value's own name."""
    if isinstance(value, FunctionType):
        if not any(part in value.__code__.co_filename for part in _INSTALLED):
            yield from _parts_of_function(value)
    elif type(value) is functools.partial:
        yield from value.keywords.items()
        yield from (("", part) for part in (value.func, *value.args))
    elif type(value) in (dict, list, tuple):
        if len(value) <= _MOST_ITEMS:
            items = dict(value).items() if type(value) is dict else (("", part) for part in value)
            yield from ((key if isinstance(key, str) else "", part) for key, part in items)
    elif type(value).__module__.startswith("tensorflow."):  # its context has a generator, which draws no data
        yield "", inspect.getattr_static(value, "_python_function", None)
    elif not issubclass(type(value), ModuleType):
        if issubclass(type(value), MethodType | staticmethod | classmethod):
            yield from (("", value.__func__), ("", getattr(value, "__self__", None)))
        if type(value).__dictoffset__:
            yield from dict(getattr(value, "__dict__", {})).items()
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            yield from ((name, getattr(value, name, None)) for name in ((slots,) if isinstance(slots, str) else slots))
            yield from (("", part) for part in list(vars(base).values()) if isinstance(part, FunctionType))


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, given = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = set(_names(code))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield name, value
        if issubclass(type(value), ModuleType):
            yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _contents(function: Any) -> Counter[tuple[str, bytes]]:
    """Counts the operations of a concrete function and those it calls; constants by their serialised value.

    Names are left out, and string constants, which hold names in asserts: those differ from trace to trace.
    """
    return Counter((node.op, _value(node)) for node in nodes(function))


def _value(node: Any) -> bytes:
    constant = node.attr["value"] if node.op == "Const" else None
    return b"" if constant is None or constant.tensor.dtype == types_pb2.DT_STRING else constant.SerializeToString()


def _shown(item: tuple[str, bytes] | None) -> str:
    if item is None:
        return "nothing"
    operation, value = item
    if operation != "Const":
        return f"an operation {operation}"
    flat = tf.make_ndarray(tf.compat.v1.AttrValue.FromString(value).tensor).ravel()
    return f"the constant {flat[0] if flat.size == 1 else flat[:3].tolist()}"
