"""XLA's log lines, read.

A compilation is reported by the thread that compiles, TensorFlow's device_compiler.h at its end, xla_compiler.cc on the
way (shortened):

    I0000 00:00:1795266330.181  16901 xla_compiler.cc:820] XlaCompiler::CompileFunction __inference_f_29[…]
    I0000 00:00:1795266330.181  16901 xla_compiler.cc:1265] XLA computation inputs:
    I0000 00:00:1795266330.181  16901 xla_compiler.cc:1268]   XLA arg 0 shape: f32[7,5] name:  TF arg 0 node name:
    I0000 00:00:1795266330.240  16901 device_compiler.h:538] Compilation of XLA executable time: 59.4 ms (59408 us) (…

Only variables have a name. Loops and branches report themselves as functions inside.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tfopt.xla.compilation import Compilation, History, readable

_LINE = re.compile(r"[IWEF]\d{4} (?:(\d+):(\d+):)([\d.]+) +(\d+) [\w.]+:\d+\] *(.*)")
_START = re.compile(r"XlaCompiler::CompileFunction (.+?)\[")
_INPUTS = "XLA computation inputs:"
_INPUT = re.compile(r"XLA arg \d+ shape: (.*?) name: (.*) TF arg (\d+) node name:")
_END = re.compile(r"Compilation of XLA executable time:.*?\((\d+) us\)")
_TRACED = re.compile(r"(?:__inference_|__forward_|__backward_)*(.*?)(?:_\d+)?")
# On a busy machine the end is stamped late.
_LATE_SECONDS = 0.05


@dataclass(slots=True)
class _Started:
    """A function whose compilation has begun."""

    module: str
    at_seconds: float
    read: bool = False  # its inputs stood there: it got past TensorFlow's part, which refuses unknown operations
    inputs: dict[int, str] = field(default_factory=dict)
    variables: list[str] = field(default_factory=list)


class Reports:
    """Turns XLA's lines into compilations; call it with each new piece of the log, in order."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._threads: dict[str, list[_Started]] = defaultdict(list)

    def read(self, lines: Iterable[str]) -> list[Compilation]:
        """Returns the compilations that ended in these lines, without those that failed in TensorFlow's part."""
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
        # What began earlier was no compilation: tf.function.experimental_get_compiler_ir() reports a beginning too.
        inside = [one for one in started if one.at_seconds >= now - seconds - _LATE_SECONDS] or started
        outermost = next(iter(inside), None)
        if outermost is None or not outermost.read:
            return []
        function = _TRACED.fullmatch(outermost.module)[1]  # type: ignore[index]
        variables = tuple(outermost.variables)
        return [self._history.add(function, outermost.module, seconds, outermost.inputs, variables=variables)]
