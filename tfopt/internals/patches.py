"""What is done to Keras and TensorFlow: patches of their functions, in one list, undone in any order."""

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import CellType, ModuleType
from typing import Any

from tfopt.errors import UnsupportedError

Function = Callable[..., Any]

_lock = threading.RLock()
_functions: "list[_Patched]" = []


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """A function in place of one of Keras' or TensorFlow's."""

    owner: Any
    """The class, module or cell of a closure that holds the function."""
    name: str
    """Its name there."""
    make: Callable[[Function], Function]
    """Returns the replacement of a function, which may be the replacement of another patch."""
    by: str
    """Who patched it, for `tfopt.repairs.status`."""
    on_top: bool = False
    """Whether it stands over the other patches of the function, also over later ones."""

    def __str__(self) -> str:
        if isinstance(self.owner, CellType):
            return str(self.owner.cell_contents.__qualname__)
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}.{self.name}"


def put(patches: Iterable[Patch]) -> None:
    """Puts patches in place, all or none."""
    with _lock:
        done: list[Patch] = []
        try:
            for patch in patches:
                # What others have put over a function that is patched here is patched as any other function.
                function = next((one for one in _functions if one.is_of(patch) and one.is_in_place()), None)
                is_new = function is None
                function = function or _Patched(patch)
                function.change([*function.patches, patch])
                if is_new:
                    _functions.append(function)
                done.append(patch)
        except BaseException:
            undo(done)
            raise


def undo(patches: Iterable[Patch]) -> None:
    """Removes patches, all or none, even from under later ones in the list.

    Raises:
        tfopt.errors.UnsupportedError: If others have replaced a function since.
    """
    with _lock:
        patched = [(patch, next(one for one in _functions if patch in one.patches)) for patch in patches]
        for patch, function in patched:
            if not function.is_in_place():
                raise UnsupportedError(
                    f"Expected {patch} as {patch.by} left it. Found: another patch on top. Remove that one first."
                )
        for patch, function in patched:
            function.change([one for one in function.patches if one is not patch])
            if not function.patches:
                _functions.remove(function)


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Function], Function], *, by: str) -> Iterator[None]:
    """Patches a function in a block."""
    patch = Patch(owner, name, make, by)
    put([patch])
    try:
        yield
    finally:
        undo([patch])


def is_in_place(patch: Patch) -> bool:
    """Whether the function already has a patch of the same `by`, and nothing else has replaced it since."""
    with _lock:
        return any(
            one.is_of(patch) and one.is_in_place() and any(other.by == patch.by for other in one.patches)
            for one in _functions
        )


def present() -> list[Patch]:
    """All patches, in the order in which their functions were first patched."""
    with _lock:
        return [patch for function in _functions for patch in function.patches]


class _Patched:
    """A function with its patches, the innermost first."""

    def __init__(self, patch: Patch) -> None:
        self.patches: list[Patch] = []
        self._owner, self._name = patch.owner, patch.name
        self._is_inherited = isinstance(patch.owner, type) and patch.name not in vars(patch.owner)
        self._made = [getattr(patch.owner, patch.name)]  # the original, then each patch's

    def is_of(self, patch: Patch) -> bool:
        return self._owner is patch.owner and self._name == patch.name

    def is_in_place(self) -> bool:
        return getattr(self._owner, self._name) is self._made[-1]

    def change(self, patches: list[Patch]) -> None:
        """Makes the replacements anew from the first patch on that differs."""
        patches = sorted(patches, key=lambda patch: patch.on_top)
        kept = len(list(takewhile(lambda pair: pair[0] is pair[1], zip(patches, self.patches, strict=False))))
        made = self._made[: kept + 1]
        for patch in patches[kept:]:
            made.append(_replacement(made[-1], patch.make))
        old, self._made, self.patches = self._made[-1], made, patches
        self._set(old, made[-1])

    def _set(self, old: Any, new: Any) -> None:
        if not isinstance(self._owner, ModuleType):
            if self._is_inherited and not self.patches:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, new)
            return
        # `from module import function` created names for it in other modules.
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for alias in [alias for alias, value in list(vars(module).items()) if value is old]:
                    vars(module)[alias] = new


def _replacement(original: Any, make: Callable[[Function], Function]) -> Any:
    function: Any = original.fget if isinstance(original, property) else original
    replacement = functools.wraps(function)(make(function))
    return replacement if function is original else property(replacement)
