"""The form of a repair: a defect, how to recognise it by its source, and how to mend it and take that back."""

import ast
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import sys
import textwrap
import threading
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tfopt.errors import UnsupportedError

Function = Callable[..., Any]
_lock = threading.RLock()
_turns = itertools.count(1)


@dataclass(slots=True, kw_only=True, eq=False)
class Repair:
    """A defect of Keras or TensorFlow, recognised by its source, and its repair.

    Nothing is patched before `install`. The source of each function that the repair relies on is compared with what
    was seen when it was written. Version numbers play no part: a release that leaves these functions alone changes
    nothing, one that touches them is refused until somebody has looked.

    Attributes:
        name: As it is called in `tfopt.repairs.install`.
        defect: What is wrong, in a sentence.
        reference: Where it was reported, or where it stands.
        broken: Function, as "module:Class.function" or "module:function", to the fingerprints of its source that are
            known to be broken (or, for a function that only helps, known to work with the repair).
        replace: Function to what makes its replacement out of the original. A function of `broken` that is missing
            here is only read.
        mended: Function to the fingerprints in which upstream has mended it.
        without: How to go on without the repair.
        unpatched: What it means that nothing is patched, in a sentence or two.
        turn: Its place in the order in which repairs were put in place. Two may have changed one function: the later
            one is taken back first.

    Example:
        >>> tfopt.repairs.CLEAR_SESSION.install()
        >>> tfopt.repairs.CLEAR_SESSION.installed
        True
    """

    name: str
    defect: str
    reference: str
    broken: Mapping[str, frozenset[str]]
    replace: Mapping[str, Callable[[Function], Function]]
    without: str
    unpatched: str = "It stays unpatched, and this may still be wrong:"
    mended: Mapping[str, frozenset[str]] = field(default_factory=dict)
    turn: int = field(default=0, init=False)
    _patches: list[tuple[str, Function, Function]] = field(default_factory=list, init=False, repr=False)
    _for_good: bool = field(default=False, init=False, repr=False)
    _blocks: int = field(default=0, init=False, repr=False)

    @property
    def installed(self) -> bool:
        """Whether the repair is in place."""
        return bool(self._patches)

    def applies(self) -> bool:
        """Tells whether the installed Keras or TensorFlow has the defect.

        Returns:
            True where it is known to be broken, False where it is known to be mended.

        Raises:
            tfopt.errors.UnsupportedError: A function is neither, or its source cannot be read.
        """
        mended = False
        for target, broken in self.broken.items():
            try:
                found = fingerprint(_find(target)[2])
            except (ImportError, AttributeError, OSError, TypeError, SyntaxError) as error:
                raise self._unknown(target, f"its source cannot be read ({error})") from error
            if found in self.mended.get(target, ()):
                mended = True
            elif found not in broken:
                raise self._unknown(target, f"a version with the fingerprint {found}")
        return not mended

    def install(self) -> None:
        """Puts the repair in place until `remove`, where the defect is there; again, it does nothing.

        Raises:
            tfopt.errors.UnsupportedError: As for `applies`.
        """
        with _lock:
            self._patch()
            self._for_good = self.installed

    def remove(self) -> None:
        """Puts the original functions back.

        Raises:
            tfopt.errors.UnsupportedError: Somebody else has patched the function since.
        """
        with _lock:
            self._unpatch()
            self._for_good = False

    @contextmanager
    def during(self) -> Iterator[None]:
        """Puts the repair in place for a block, unless it is already; an `install` inside the block outlasts it.

        Raises:
            tfopt.errors.UnsupportedError: As for `applies`.
        """
        with _lock:
            self._patch()
            self._blocks += 1
        try:
            yield
        finally:
            with _lock:
                self._blocks -= 1
                if not self._blocks and not self._for_good:
                    self._unpatch()

    def _patch(self) -> None:
        if self.installed or not self.applies():
            return
        for target, make in self.replace.items():
            original = _find(target)[2]
            replacement = functools.wraps(original)(make(original))
            _put(target, original, replacement)
            self._patches.append((target, original, replacement))
        self.turn = next(_turns)

    def _unpatch(self) -> None:
        for target, _, replacement in self._patches:
            if _find(target)[2] is not replacement:
                raise UnsupportedError(
                    f"Expected {target} to be as the repair {self.name!r} left it. Found another patch on top of it. "
                    "Remove that one first."
                )
        for target, original, replacement in self._patches:
            _put(target, replacement, original)
        self._patches.clear()

    def _unknown(self, target: str, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"Expected {target} as tfopt's {self.name!r} knows it. Found {found}. {self.unpatched} {self.defect} "
            f"{self.without}"
        )


def fingerprint(function: Function) -> str:
    """Returns a hash of a function's source without docstring, comments and blank lines.

    It is taken of the innermost function: decorators that call `functools.wraps`, and repairs already in place, are
    looked through. The text is hashed, not the syntax tree, whose printed form changes between versions of Python.

    Raises:
        OSError, TypeError: There is no source to read.
    """
    source = textwrap.dedent(inspect.getsource(function))
    lines = source.splitlines()
    definition: Any = ast.parse(source).body[0]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    if ast.get_docstring(definition) is not None:
        docstring = definition.body[0]
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _find(target: str) -> tuple[Any, str, Function]:
    """The module or class that holds a function, the function's name there, and the function."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return owner, name, getattr(owner, name)


def _put(target: str, old: Function, new: Function) -> None:
    owner, name, _ = _find(target)
    if not isinstance(owner, ModuleType):
        setattr(owner, name, new)
        return
    # Whoever wrote `from module import function` holds it under a name of its own.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for alias in [alias for alias, value in list(vars(module).items()) if value is old]:
                vars(module)[alias] = new
