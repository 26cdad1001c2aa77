"""Parses XLA's log lines into compilations, each with its cause: the input that differs from an earlier compilation.

The compiling thread logs these lines (shortened), from TensorFlow's xla_compiler.cc and, at the end, device_compiler.h:

    I0000 00:00:1795266330.181  16901 xla_compiler.cc:820] XlaCompiler::CompileFunction __inference_f_29[…]
    I0000 00:00:1795266330.181  16901 xla_compiler.cc:1265] XLA computation inputs:
    I0000 00:00:1795266330.181  16901 xla_compiler.cc:1268]   XLA arg 0 shape: f32[7,5] name:  TF arg 0 node name:
    I0000 00:00:1795266330.240  16901 device_compiler.h:538] Compilation of XLA executable time: 59.4 ms (59408 us) (…

Only variables have a name. Loops and branches are logged as inner functions.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tfopt.text import listed
from tfopt.xla.log.traced_functions import TracedFunction, traced_function

_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,<=?]*)\](?:\{[\d,]*\})?")
_DTYPES = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
_NAMED = 3  # inputs named in a cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One compilation by XLA."""

    function: str
    """Name of the Python function. Under Keras it is `one_step_on_data` for training, evaluation and prediction, which
    `step` tells apart."""
    module: str
    """TensorFlow's name for the traced function that was compiled."""
    seconds: float | None
    """Compile time; None if TensorFlow did not report it."""
    inputs: Mapping[int, str]
    """Shape of each input by number, `{0: "float32 (32, 8, 8, 1)", 1: "int32 (32,)"}`. A batch `(x, y)` has numbers 0
    and 1. Variables, and inputs that XLA treats as constants, are excluded."""
    variables: tuple[str, ...]
    """Names of the variables it uses, which distinguish Keras' functions of the same name."""
    changed: tuple[int, ...]
    """Numbers of the inputs whose shape or dtype differs from the nearest earlier compilation of the function."""
    cause: str
    """Why it was compiled: "x: (32, 8, 8, 1) → (17, 8, 8, 1)"."""
    step: str | None = None
    """ "training step", "evaluation step" or "prediction step" of a Keras model; None for another function."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the inputs by number: `x`, `y`, `x["image"]`, or the function's own arguments. Empty if the function no
    longer existed when its compilation was read."""

    @property
    def label(self) -> str:
        """What was compiled: the step, or the function's name."""
        return f"the {self.step}" if self.step else self.function

    def name_of(self, number: int) -> str:
        """The name of an input, or "input 3" if it is unknown."""
        return _name(self.names, number)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        plain = {"function": self.function, "module": self.module, "seconds": self.seconds, "cause": self.cause}
        inputs = {str(number): shape for number, shape in self.inputs.items()}
        names = {str(number): name for number, name in self.names.items()}
        lists = {"variables": [*self.variables], "changed": [*self.changed]}
        return plain | lists | {"inputs": inputs, "step": self.step, "names": names}

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f" {self.seconds:.3g} s,"
        return f"{self.step or self.function}:{seconds} {self.cause}"


class History:
    """Remembers what was compiled during watches in this process, to find each compilation's cause."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[tuple[str, Mapping[int, str]]]] = {}

    def add(
        self,
        function: str,
        module: str,
        seconds: float | None,
        inputs: Mapping[int, str],
        *,
        variables: tuple[str, ...] = (),
        owner: Hashable = None,
        step: str | None = None,
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> Compilation:
        """Returns the compilation with its cause. Arguments are the fields of `Compilation`.

        `owner` tells this function from others of the same name.
        """
        earlier = self._seen.setdefault((function, step, variables, frozenset(inputs), owner), [])
        # Of equally near ones the latest, since the user has its shape in mind.
        near = min(reversed(earlier), key=lambda other: len(_changed(other[1], inputs)), default=None)
        changed = _changed(near[1], inputs) if near else ()
        earlier.append((module, inputs))
        return Compilation(
            function=function,
            module=module,
            seconds=seconds,
            inputs=inputs,
            variables=variables,
            changed=changed,
            cause=_cause(near, module, inputs, changed, names),
            step=step,
            names=names,
        )


def readable(shape: str) -> str:
    """Rewrites XLA's `f32[4,5]` as `float32 (4, 5)`; anything but an array stays as it is."""
    found = _SHAPE.fullmatch(shape)
    if not found:
        return shape
    letters, bits = re.fullmatch(r"([a-z]+)(\d*)", found[1]).groups()  # type: ignore[union-attr]
    sizes = found[2].split(",") if found[2] else []
    return f"{_DTYPES.get(letters, letters)}{bits} ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def sizes(text: str) -> tuple[str, ...]:
    """Sizes in a shape that `readable` returned: `("4", "5")` for `float32 (4, 5)`."""
    inside = text.partition(" (")[2].rstrip(")")
    return tuple(size.strip() for size in inside.split(",") if size.strip())


def _changed(before: Mapping[int, str], now: Mapping[int, str]) -> tuple[int, ...]:
    return tuple(number for number in now if before[number] != now[number])


def _cause(
    near: tuple[str, Mapping[int, str]] | None,
    module: str,
    inputs: Mapping[int, str],
    changed: tuple[int, ...],
    names: Mapping[int, str],
) -> str:
    if near is None:
        return "its first compilation here"
    if changed:
        steps = [f"{_name(names, number)}: {_step(near[1][number], inputs[number])}" for number in changed]
        return listed(steps, _NAMED)
    if near[0] == module:
        return "inputs of the same shapes; another device, or another value of an input that XLA treats as constant"
    return "inputs of the same shapes; retraced, for another Python argument or by a new tf.function"


def _name(names: Mapping[int, str], number: int) -> str:
    return names.get(number, f"input {number}")


def _step(before: str, now: str) -> str:
    """`before → now`, with the dtype only where it changes."""
    dtype, _, shape = before.partition(" (")
    new_dtype, _, new_shape = now.partition(" (")
    return f"({shape} → ({new_shape}" if dtype == new_dtype and new_shape else f"{before} → {now}"


_LINE = re.compile(r"[IWEF]\d{4} (?:(\d+):(\d+):)([\d.]+) +(\d+) [\w.]+:\d+\] *(.*)")
_START = re.compile(r"XlaCompiler::CompileFunction (.+?)\[")
_INPUTS = "XLA computation inputs:"
_INPUT = re.compile(r"XLA arg \d+ shape: (.*?) name: (.*) TF arg (\d+) node name:")
_END = re.compile(r"Compilation of XLA executable time:.*?\((\d+) us\)")
_TRACED = re.compile(r"(?:__inference_|__forward_|__backward_)*(.*?)(?:_\d+)?")
# On a busy machine the last line's time stamp is late.
_LATE_SECONDS = 0.05


@dataclass(slots=True)
class _Started:
    """A function whose compilation has begun."""

    module: str
    at_seconds: float
    read: bool = False  # its inputs were logged, so TensorFlow did not refuse an unknown operation
    inputs: dict[int, str] = field(default_factory=dict)
    variables: list[str] = field(default_factory=list)


class LogParser:
    """Turns XLA's log lines into compilations."""

    def __init__(self, history: History, lookup: Callable[[str], TracedFunction | None] = traced_function) -> None:
        self._history, self._lookup = history, lookup
        self._known: dict[str, tuple[str | None, dict[int, str]]] = {}
        self._threads: dict[str, list[_Started]] = defaultdict(list)

    def parse(self, lines: Iterable[str]) -> list[Compilation]:
        """Returns the compilations that ended in `lines`, the next part of the log, except those TensorFlow refused."""
        done = []
        for line in lines:
            found = _LINE.match(line)
            if not found:
                continue
            hours, minutes, seconds, thread, text = found.groups()
            now = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
            end = _END.match(text)
            if end:
                done += self._end(self._threads.pop(thread, []), now, int(end[1]) / 1e6)
            else:
                self._follow(self._threads[thread], now, text)
        return done

    def _follow(self, started: list[_Started], now: float, text: str) -> None:
        start = _START.match(text)
        if start:
            started.append(_Started(start[1], now))
        elif not started:
            return
        elif text == _INPUTS:
            started[-1].read = True
        elif found := _INPUT.match(text):
            shape, name, number = found.groups()
            if name:
                started[-1].variables.append(name)
            else:
                started[-1].inputs.setdefault(int(number), readable(shape))

    def _end(self, started: list[_Started], now: float, seconds: float) -> list[Compilation]:
        # An earlier start was no compilation: tf.function.experimental_get_compiler_ir() logs one too.
        inside = [one for one in started if one.at_seconds >= now - seconds - _LATE_SECONDS] or started
        outermost = next(iter(inside), None)
        if outermost is None or not outermost.read:
            return []
        function = _TRACED.fullmatch(outermost.module)[1]  # type: ignore[index]
        variables = tuple(outermost.variables)
        step, names = self._described(outermost.module)
        return [
            self._history.add(
                function, outermost.module, seconds, outermost.inputs, variables=variables, step=step, names=names
            )
        ]

    def _described(self, module: str) -> tuple[str | None, dict[int, str]]:
        """The step and the inputs' names of a traced function, looked up once."""
        if module not in self._known:
            found = self._lookup(module)
            self._known[module] = (found.step, dict(enumerate(found.inputs))) if found else (None, {})
        return self._known[module]
