"""Describes classes by their code, and objects by their class and state."""

import contextlib
import types
from collections.abc import Iterator
from dataclasses import Field
from typing import Any

from tfopt.pipelines.cache.fingerprint.callables import NATIVE
from tfopt.pipelines.cache.fingerprint.description import Description, RefusedError
from tfopt.pipelines.cache.fingerprint.modules import installed
from tfopt.pipelines.cache.fingerprint.packages import by_name, package_of
from tfopt.pipelines.cache.fingerprint.values import CONTENTS, named, reduced

_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE; static types are compiled code
_COMPILED_METHODS = frozenset({"cython_function_or_method", "instancemethod", "nb_method"})  # instancemethod: pybind11
# Cosmetic, or made of the rest.
_LEFT_OUT = frozenset(
    [
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    ]
)


def describe_class(kind: type) -> Description:
    """Describes a package's class by name, a user's by its bases, methods and attributes.

    Raises:
        RefusedError: It is compiled code that no package brought.
    """
    package = package_of(kind.__module__)
    if package and (by_name(kind) or _is_compiled(kind)):
        return installed(f"{kind.__module__}.{kind.__qualname__}", package)
    if _is_compiled(kind):
        raise RefusedError(f"the class {kind.__qualname__} of compiled code that no installed package brought")
    own = {name: value for name, value in vars(kind).items() if name not in _LEFT_OUT}
    bases = [(f"base `{base.__name__}`", base) for base in kind.__bases__]
    attributes = Description("attributes", parts=named(own.items(), "attribute `{}`"))
    return Description("class", kind.__name__, [*bases, ("its metaclass", type(kind)), ("", attributes)])


def describe_object(value: Any) -> Description:
    """Describes an object by its class and what it holds; no code of the class is run.

    Raises:
        RefusedError: Compiled code holds a part that cannot be read.
    """
    kind = type(value)
    if kind is Field:
        return _field(value)
    base = next((base for base in kind.__mro__ if base in CONTENTS), None)
    hidden = [part for part in kind.__mro__ if part not in (object, base) and _is_compiled(part)]
    if kind in hidden and by_name(value) and (package := package_of(value.__module__)):
        return installed(f"{value.__module__}.{value.__qualname__}", package)  # such as np.mean
    if hidden and not (kind in hidden and _is_pythons(kind)):
        raise RefusedError(
            f"an object of type {kind.__module__}.{kind.__qualname__}, whose state compiled code holds "
            f"({hidden[0].__module__}.{hidden[0].__qualname__})"
        )
    if hidden or kind is object:
        return reduced(value)
    contents = [("", CONTENTS[base](value))] if base else []
    # functools.update_wrapper leaves the module and docstring of a function on objects, too.
    held = [(name, part) for name, part in _state(value) if name not in _LEFT_OUT]
    state = Description("state", parts=named(held, "attribute `{}`"))
    return Description("object", parts=[("its class", kind), *contents, ("", state)])


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that an object holds itself, without running its `__getattribute__`."""
    with contextlib.suppress(AttributeError):  # it has slots alone
        yield from object.__getattribute__(value, "__dict__").items()
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is types.MemberDescriptorType:
                try:
                    yield name, slot.__get__(value)
                except AttributeError:  # not assigned
                    continue


def _field(value: Any) -> Description:
    """Describes a dataclass's field without its type, which may be anything and computes nothing."""
    held = ("default", "default_factory", "init", "kw_only", "metadata")
    return Description("field", value.name, [(f"`{name}`", getattr(value, name)) for name in held])


def _is_pythons(kind: type) -> bool:
    return package_of(kind.__module__) == package_of("builtins")


def _is_compiled(kind: type) -> bool:
    """Whether a class's own part is compiled code, which may keep a state that nothing shows."""
    return not kind.__flags__ & _HEAPTYPE or any(
        _is_compiled_member(kind, name, value) for name, value in vars(kind).items()
    )


def _is_compiled_member(kind: type, name: str, value: Any) -> bool:
    if type(value) in NATIVE:
        return value.__objclass__ is kind and name not in ("__dict__", "__weakref__")
    if name == "__new__" and type(value) is types.BuiltinFunctionType:
        return value.__self__ is kind
    return type(value).__name__ in _COMPILED_METHODS
