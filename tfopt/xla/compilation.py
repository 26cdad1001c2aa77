"""One compilation by XLA, and what it was for: which input differs from those that were compiled before."""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from tfopt.text import listed

_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,<=?]*)\](?:\{[\d,]*\})?")
_DTYPES = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
_NAMED = 3  # inputs named in a cause; what changes all of them at once is clear from three


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One compilation by XLA.

    Attributes:
        function: The Python function's name; under Keras `one_step_on_data`, for training, evaluation and prediction.
        module: TensorFlow's name of the traced function that was compiled.
        seconds: What the compilation took; None where TensorFlow did not report it.
        inputs: The shape of each input by its number, `{0: "float32 (32, 8, 8, 1)", 1: "int32 (32,)"}`. A batch
            `(x, y)` has numbers 0 and 1. Not among them: variables and inputs that XLA takes for constants.
        variables: Names of the variables that it uses; they tell Keras' functions of one name apart.
        changed: Numbers of the inputs whose shape or dtype differs from the nearest compilation before of the same
            function.
        cause: In words: "input 0: (32, 8, 8, 1) → (17, 8, 8, 1)".
    """

    function: str
    module: str
    seconds: float | None
    inputs: Mapping[int, str]
    variables: tuple[str, ...]
    changed: tuple[int, ...]
    cause: str

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        plain = {"function": self.function, "module": self.module, "seconds": self.seconds, "cause": self.cause}
        inputs = {str(number): shape for number, shape in self.inputs.items()}
        return plain | {"inputs": inputs, "variables": [*self.variables], "changed": [*self.changed]}

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f" {self.seconds:.3g} s,"
        return f"{self.function}:{seconds} {self.cause}"


class History:
    """What was compiled in this process while it was watched, to tell each compilation's cause."""

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
    ) -> Compilation:
        """Returns the compilation with its cause.

        Args:
            function: As in `Compilation`.
            module: As there.
            seconds: As there.
            inputs: As there.
            variables: As there.
            owner: What else tells this function from others of its name.
        """
        earlier = self._seen.setdefault((function, variables, frozenset(inputs), owner), [])
        # Of those equally near the latest: the shape before is what the user knows.
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
            cause=_cause(near, module, inputs, changed),
        )


def readable(shape: str) -> str:
    """`float32 (4, 5)` for XLA's `f32[4,5]`; what is no array stays as it is."""
    found = _SHAPE.fullmatch(shape)
    if not found:
        return shape
    letters, bits = re.fullmatch(r"([a-z]+)(\d*)", found[1]).groups()  # type: ignore[union-attr]
    sizes = found[2].split(",") if found[2] else []
    return f"{_DTYPES.get(letters, letters)}{bits} ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def sizes(text: str) -> tuple[str, ...]:
    """The sizes in what `readable` returns: `("4", "5")` of `float32 (4, 5)`."""
    inside = text.partition(" (")[2].rstrip(")")
    return tuple(size.strip() for size in inside.split(",") if size.strip())


def _changed(before: Mapping[int, str], now: Mapping[int, str]) -> tuple[int, ...]:
    return tuple(number for number in now if before[number] != now[number])


def _cause(
    near: tuple[str, Mapping[int, str]] | None, module: str, inputs: Mapping[int, str], changed: tuple[int, ...]
) -> str:
    if near is None:
        return "its first compilation here"
    if changed:
        return listed([f"input {number}: {_step(near[1][number], inputs[number])}" for number in changed], _NAMED)
    if near[0] == module:
        return "inputs of the same shapes; another value of an input that XLA takes for a constant, or another device"
    return "inputs of the same shapes; traced anew, for another Python argument or by a new tf.function"


def _step(before: str, now: str) -> str:
    """From what to what; the dtype only where it changes."""
    dtype, _, shape = before.partition(" (")
    new_dtype, _, new_shape = now.partition(" (")
    return f"({shape} → ({new_shape}" if dtype == new_dtype and new_shape else f"{before} → {now}"
