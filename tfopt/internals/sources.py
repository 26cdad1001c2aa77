"""Functions of Keras and TensorFlow by name, and the fingerprints of their source."""

import ast
import functools
import gc
import hashlib
import importlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from tfopt.errors import UnsupportedError

Function = Callable[..., Any]
# Classes by another name, since a release.
_RENAMED = {
    ("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer"): "Trainer",  # Keras 3.16
    ("keras.src.trainers.trainer", "Trainer"): "BaseTrainer",  # Keras 3.16
}


def find(target: str) -> tuple[Any, str]:
    """The module or class that holds a function, "module:Class.function" or "module:function", and its name there.

    Raises:
        ImportError, AttributeError: If there is none.
    """
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    found = importlib.import_module(module)
    if owners and not hasattr(found, owners[0]):
        owners[0] = _RENAMED.get((module, owners[0]), owners[0])
    return functools.reduce(getattr, owners, found), name


class Missing:
    """Stands for something private that this release lacks: all can be imported, what uses it is refused."""

    def __init__(self, target: str, error: Exception) -> None:
        self._refusal = (target, error)

    def _refuse(self, *_: Any) -> Any:
        target, error = self._refusal
        package = re.split("[.:]", target)[0]
        raise UnsupportedError(
            f"Expected {target.replace(':', '.')}, on which this feature relies. Found: none in {package} "
            f"{version(package)} ({error}). Use a release that docs/versions.md names, or do without the feature."
        ) from error

    __call__ = __getattr__ = __instancecheck__ = _refuse

    def __or__(self, _: Any) -> "Missing":  # as annotations say `Missing | None`
        return self

    __ror__ = __or__


def private(target: str) -> Any:
    """Something private of Keras or TensorFlow, "module", "module:name" or "module:Class.name".

    If there is none, what comes back raises `UnsupportedError` when it is used.
    """
    module, colon, _ = target.partition(":")
    try:
        return getattr(*find(target)) if colon else importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        return Missing(target, error)


def fingerprint(function: Function) -> str:
    """Hashes a function's (or property's) source without docstring, comments and blank lines.

    It sees through decorators that use `functools.wraps`, such as patches. It hashes text, not the syntax tree, whose
    printed form differs between Python versions.

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
