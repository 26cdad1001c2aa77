"""One compilation by XLA, with its cause: the input that differs from an earlier compilation."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tfopt.text import listed

_NAMED = 3  # inputs named in a cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One compilation by XLA: a traced function that ran with inputs of new shapes or dtypes."""

    function: str
    """Name of the Python function. Under Keras it is `one_step_on_data` for training, evaluation and prediction, which
    `step` tells apart."""
    module: str
    """TensorFlow's name for the traced function that was compiled."""
    seconds: float
    """Wall time of that first run: XLA's compilation and the run itself (on a GPU, until it is launched)."""
    inputs: Mapping[int, str]
    """Shape of each input by number, `{0: "float32 (32, 8, 8, 1)", 1: "int32 (32,)"}`. A batch `(x, y)` has numbers 0
    and 1. Variables are excluded."""
    variables: tuple[str, ...]
    """Names of the variables it uses, which distinguish Keras' functions of the same name."""
    changed: tuple[int, ...]
    """Numbers of the inputs whose shape or dtype differs from the nearest earlier signature of the function."""
    cause: str
    """Why it was compiled: "x: (32, 8, 8, 1) → (17, 8, 8, 1)"."""
    step: str | None = None
    """ "training step", "evaluation step" or "prediction step" of a Keras model; None for another function."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the inputs by number: `x`, `y`, `x["image"]`, or the function's own arguments. Empty for a gradient."""

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
        return f"{self.step or self.function}: {self.seconds:.3g} s, {self.cause}"


class History:
    """Remembers what was compiled during watches in this process, to find each compilation's cause."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[Mapping[int, str]]] = {}

    def add(
        self,
        function: str,
        module: str,
        seconds: float,
        inputs: Mapping[int, str],
        *,
        variables: tuple[str, ...] = (),
        step: str | None = None,
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> Compilation:
        """Returns the compilation with its cause. Arguments are the fields of `Compilation`."""
        earlier = self._seen.setdefault((function, step, variables, frozenset(inputs)), [])
        # Of equally near ones the latest, since the user has its shape in mind.
        near = min(reversed(earlier), key=lambda other: len(_changed(other, inputs)), default=None)
        changed = _changed(near, inputs) if near is not None else ()
        earlier.append(inputs)
        return Compilation(
            function=function,
            module=module,
            seconds=seconds,
            inputs=inputs,
            variables=variables,
            changed=changed,
            cause=_cause(near, inputs, changed, names),
            step=step,
            names=names,
        )


def sizes(text: str) -> tuple[str, ...]:
    """Sizes in an input's shape: `("4", "5")` for `float32 (4, 5)`."""
    inside = text.partition(" (")[2].rstrip(")")
    return tuple(size.strip() for size in inside.split(",") if size.strip())


def _changed(before: Mapping[int, str], now: Mapping[int, str]) -> tuple[int, ...]:
    return tuple(number for number in now if before[number] != now[number])


def _cause(
    near: Mapping[int, str] | None, inputs: Mapping[int, str], changed: tuple[int, ...], names: Mapping[int, str]
) -> str:
    if near is None:
        return "its first run in a watch"
    if changed:
        steps = [f"{_name(names, number)}: {_step(near[number], inputs[number])}" for number in changed]
        return listed(steps, _NAMED)
    return "inputs of the same shapes; retraced, for another Python argument or by a new tf.function"


def _name(names: Mapping[int, str], number: int) -> str:
    return names.get(number, f"input {number}")


def _step(before: str, now: str) -> str:
    """`before → now`, with the dtype only where it changes."""
    dtype, _, shape = before.partition(" (")
    new_dtype, _, new_shape = now.partition(" (")
    return f"({shape} → ({new_shape}" if dtype == new_dtype and new_shape else f"{before} → {now}"
