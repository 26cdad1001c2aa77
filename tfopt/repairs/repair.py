"""What a repair is: a defect recognised by its source, and reversible patches that fix it."""

import ast
import functools
import gc
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

import tensorflow as tf

from tfopt.errors import UnsupportedError

Function = Callable[..., Any]
_lock = threading.RLock()
_turns = itertools.count(1)
_thread = threading.local()


@dataclass(slots=True, kw_only=True, eq=False)
class Repair:
    """A defect of Keras or TensorFlow, recognised by its source, and the patches that repair it.

    Nothing is patched before `install`, which compares the source of every function the repair relies on with known
    fingerprints. Version numbers do not matter: a release that leaves these functions alone changes nothing, and one
    that touches them is refused until someone has looked.

    Example:
        >>> tfopt.repairs.CLEAR_SESSION.install()
        >>> tfopt.repairs.CLEAR_SESSION.installed
        True
    """

    name: str
    """Name for `tfopt.repairs.install`."""
    defect: str
    """What is wrong, in a sentence."""
    reference: str
    """The upstream report, or the code at fault."""
    broken: Mapping[str, frozenset[str]]
    """Function ("module:Class.function" or "module:function") → fingerprints known to be broken or, for functions that
    are not replaced, known to work with the repair."""
    replace: Mapping[str, Callable[[Function], Function]]
    """Function → factory that turns the original into its replacement."""
    without: str
    """How to go on without the repair."""
    unpatched: str = "It stays unpatched, and this may still be wrong:"
    """Consequence of not patching, for the error."""
    mended: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Function → fingerprints of versions fixed upstream."""
    turn: int = field(default=0, init=False)
    """Position in the order of installation. Of two repairs of one function, the later is removed first."""
    _patches: list[tuple[str, Function, Function]] = field(default_factory=list, init=False, repr=False)
    _for_good: bool = field(default=False, init=False, repr=False)
    _blocks: int = field(default=0, init=False, repr=False)

    @property
    def installed(self) -> bool:
        """Whether the repair is installed."""
        return bool(self._patches)

    def applies(self) -> bool:
        """Whether the defect is here: True if it is known to be, False if it is known to be fixed upstream.

        Raises:
            tfopt.errors.UnsupportedError: If a function is neither, or its source cannot be read.
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
        """Installs the repair until `remove`, if the defect is there; raises as `applies`. Calls may be repeated."""
        with _lock:
            self._patch()
            self._for_good = self.installed

    def remove(self) -> None:
        """Restores the original functions.

        Raises:
            tfopt.errors.UnsupportedError: If a function has been patched again since.
        """
        with _lock:
            self._unpatch()
            self._for_good = False

    @contextmanager
    def during(self) -> Iterator[None]:
        """Installs the repair for a block; raises as `applies`. An `install` before or inside the block outlasts it."""
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
            function = original.fget if isinstance(original, property) else original
            replacement: Any = functools.wraps(function)(make(function))
            replacement = property(replacement) if function is not original else replacement
            _put(target, original, replacement)
            self._patches.append((target, original, replacement))
        self.turn = next(_turns)

    def _unpatch(self) -> None:
        for target, _, replacement in self._patches:
            if _find(target)[2] is not replacement:
                raise UnsupportedError(
                    f"Expected {target} as the repair {self.name!r} left it. Found: another patch on top. "
                    "Remove that one first."
                )
        for target, original, replacement in self._patches:
            _put(target, replacement, original)
        self._patches.clear()

    def _unknown(self, target: str, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"Expected a version of {target} that tfopt's repair {self.name!r} knows. Found: {found}. "
            f"{self.unpatched} {self.defect} {self.without}"
        )


def in_several_replicas() -> bool:
    """Whether the caller is one of several replicas under a tf.distribute strategy."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


@contextmanager
def alone() -> Iterator[None]:
    """Within the block, this thread's replica computes as if it were the only one: `trains_together` is False."""
    before, _thread.alone = is_alone(), True
    try:
        yield
    finally:
        _thread.alone = before


def is_alone() -> bool:
    """Whether the caller is inside `alone`."""
    return getattr(_thread, "alone", False)


def trains_together() -> bool:
    """Whether the caller is one of several replicas that synchronise in each step."""
    return in_several_replicas() and not is_alone()


def fingerprint(function: Function) -> str:
    """Hashes a function's (or property's) source without docstring, comments and blank lines.

    It sees through decorators that use `functools.wraps`, such as installed repairs. It hashes text, not the syntax
    tree, whose printed form differs between Python versions.

    Raises:
        OSError, TypeError: If there is no source to read.
    """
    source = textwrap.dedent(inspect.getsource(getattr(function, "fget", function)))
    lines = source.splitlines()
    with _no_collection():
        definition: Any = ast.parse(source).body[0]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    if ast.get_docstring(definition) is not None:
        docstring = definition.body[0]
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collects no garbage in a block: Python 3.11's parser fails if a finaliser runs meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _find(target: str) -> tuple[Any, str, Function]:
    """Returns the module or class that holds a function, its name there, and the function."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return owner, name, getattr(owner, name)


def _put(target: str, old: Function, new: Function) -> None:
    owner, name, _ = _find(target)
    if not isinstance(owner, ModuleType):
        setattr(owner, name, new)
        return
    # `from module import function` created names for it in other modules.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for alias in [alias for alias, value in list(vars(module).items()) if value is old]:
                vars(module)[alias] = new
