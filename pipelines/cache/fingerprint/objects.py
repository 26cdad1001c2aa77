"""Classes by their code, objects by their class and state, and what is called like a function but is not one."""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import Field
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.fingerprint.modules import by_name, installed, package_of
from tfopt.pipelines.cache.fingerprint.values import CONTENTS, Description, RefusedError, named, reduced

_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE; static types are compiled code
_COMPILED_METHODS = frozenset({"cython_function_or_method", "instancemethod", "nb_method"})  # instancemethod: pybind11
# What a compiled class, or one with __slots__, holds in place of functions.
_NATIVE = (
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
# Cosmetic, or derived from the rest.
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
        RefusedError: If it is compiled code from no installed package.
    """
    package = package_of(kind.__module__)
    if package and (by_name(kind) or _is_compiled(kind)):
        return installed(f"{kind.__module__}.{kind.__qualname__}", package)
    if _is_compiled(kind):
        raise RefusedError(f"the class {kind.__qualname__} of compiled code from no installed package")
    own = {name: value for name, value in vars(kind).items() if name not in _LEFT_OUT}
    bases = [(f"base `{base.__name__}`", base) for base in kind.__bases__]
    attributes = Description("attributes", parts=named(own.items(), "attribute `{}`"))
    return Description("class", kind.__name__, [*bases, ("its metaclass", type(kind)), ("", attributes)])


def describe_object(value: Any) -> Description:
    """Describes an object by its class and what it holds, without running code of the class.

    Raises:
        RefusedError: If compiled code holds a part that cannot be read.
    """
    kind = type(value)
    if kind is Field:
        return _field(value)
    base = next((base for base in kind.__mro__ if base in CONTENTS), None)
    hidden = [part for part in kind.__mro__ if part not in (object, base) and _is_compiled(part)]
    if kind in hidden and by_name(value) and (package := package_of(value.__module__)):
        return installed(f"{value.__module__}.{value.__qualname__}", package)  # such as np.mean
    if hidden and not (kind in hidden and package_of(kind.__module__) == package_of("builtins")):
        raise RefusedError(
            f"an object of type {kind.__module__}.{kind.__qualname__}, whose state compiled code holds "
            f"({hidden[0].__module__}.{hidden[0].__qualname__})"
        )
    if hidden or kind is object:
        return reduced(value)
    contents = [("", CONTENTS[base](value))] if base else []
    # functools.update_wrapper copies a function's module and docstring to objects as well.
    held = [(name, part) for name, part in _state(value) if name not in _LEFT_OUT]
    state = Description("state", parts=named(held, "attribute `{}`"))
    return Description("object", parts=[("its class", kind), *contents, ("", state)])


def describe_callable(value: Any) -> Description | None:
    """Describes a method, descriptor, wrapper or compiled function; returns None for anything else."""
    kind = type(value)
    if issubclass(kind, tf.types.experimental.ConcreteFunction):
        raise RefusedError("a traced tf.function, whose graph holds what was captured (pass the Python function)")
    if issubclass(kind, tf.types.experimental.PolymorphicFunction):
        return Description("tf.function", parts=[("", value.python_function), ("its signature", value.input_signature)])
    return _CALLABLES[kind](value) if kind in _CALLABLES else None


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes the object itself holds, without running its `__getattribute__`."""
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
    """Describes a dataclass field without its type, which computes nothing."""
    held = ("default", "default_factory", "init", "kw_only", "metadata")
    return Description("field", value.name, [(f"`{name}`", getattr(value, name)) for name in held])


def _is_compiled(kind: type) -> bool:
    """Whether the class's own part is compiled code, which may keep hidden state."""
    return not kind.__flags__ & _HEAPTYPE or any(
        _is_compiled_member(kind, name, value) for name, value in vars(kind).items()
    )


def _is_compiled_member(kind: type, name: str, value: Any) -> bool:
    if type(value) in _NATIVE:
        return value.__objclass__ is kind and name not in ("__dict__", "__weakref__")
    if name == "__new__" and type(value) is types.BuiltinFunctionType:
        return value.__self__ is kind
    return type(value).__name__ in _COMPILED_METHODS


def _builtin(value: Any) -> Description:
    """Describes a compiled function, or a compiled method with the object it belongs to."""
    owner = value.__self__
    if owner is not None and not issubclass(type(owner), types.ModuleType):
        return Description("compiled method", value.__name__, [("`self`", owner)])
    package = package_of(value.__module__ or "")
    if package is None:
        raise RefusedError(f"the function {value.__qualname__} of compiled code from no installed package")
    return installed(f"{value.__module__}.{value.__qualname__}", package)


def _property(value: Any) -> Description:
    return Description("property", parts=[("getter", value.fget), ("setter", value.fset), ("deleter", value.fdel)])


def _wrapped(attribute: str) -> Callable[[Any], Description]:
    return lambda value: Description(type(value).__name__, parts=[("", getattr(value, attribute))])


_CALLABLES: dict[type, Callable[[Any], Description]] = {
    types.MethodType: lambda value: Description(
        "method", parts=[("method", value.__func__), ("`self`", value.__self__)]
    ),
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: lambda value: Description("compiled method", value.__name__, [("", value.__self__)]),
    **dict.fromkeys(_NATIVE, lambda value: Description("descriptor", value.__name__, [("", value.__objclass__)])),
    types.MemberDescriptorType: lambda value: Description("slot", value.__name__),
    property: _property,
    weakref.ref: lambda value: Description("weak reference", parts=[("", value())]),  # a tf.function's `self`
    staticmethod: _wrapped("__func__"),
    classmethod: _wrapped("__func__"),
    functools.cached_property: _wrapped("func"),
    type(functools.lru_cache(lambda: None)): _wrapped("__wrapped__"),
}
