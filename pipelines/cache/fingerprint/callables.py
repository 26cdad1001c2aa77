"""Describes what is called like a function and is none: methods, descriptors, wrappers, compiled functions."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.fingerprint.description import Description, RefusedError
from tfopt.pipelines.cache.fingerprint.modules import installed
from tfopt.pipelines.cache.fingerprint.packages import package_of

# What a class of compiled code, or one with __slots__, holds in place of functions.
NATIVE = (
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def describe_callable(value: Any) -> Description | None:
    """Returns the description of something called like a function; None if it is none of these."""
    kind = type(value)
    if issubclass(kind, tf.types.experimental.ConcreteFunction):
        raise RefusedError("a traced tf.function, whose graph holds what was captured (pass the Python function)")
    if issubclass(kind, tf.types.experimental.PolymorphicFunction):
        return Description("tf.function", parts=[("", value.python_function), ("its signature", value.input_signature)])
    return _KINDS[kind](value) if kind in _KINDS else None


def _method(value: Any) -> Description:
    return Description("method", parts=[("method", value.__func__), ("`self`", value.__self__)])


def _builtin(value: Any) -> Description:
    """Describes a compiled function, or a compiled method with the object that it belongs to."""
    owner = value.__self__
    if owner is not None and not issubclass(type(owner), types.ModuleType):
        return Description("compiled method", value.__name__, [("`self`", owner)])
    package = package_of(value.__module__ or "")
    if package is None:
        raise RefusedError(f"the function {value.__qualname__} of compiled code that no installed package brought")
    return installed(f"{value.__module__}.{value.__qualname__}", package)


def _descriptor(value: Any) -> Description:
    return Description("descriptor", value.__name__, [("", value.__objclass__)])


def _property(value: Any) -> Description:
    return Description("property", parts=[("getter", value.fget), ("setter", value.fset), ("deleter", value.fdel)])


def _wrapped(attribute: str) -> Callable[[Any], Description]:
    return lambda value: Description(type(value).__name__, parts=[("", getattr(value, attribute))])


_KINDS: dict[type, Callable[[Any], Description]] = {
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: lambda value: Description("compiled method", value.__name__, [("", value.__self__)]),
    **dict.fromkeys(NATIVE, _descriptor),
    types.MemberDescriptorType: lambda value: Description("slot", value.__name__),
    property: _property,
    weakref.ref: lambda value: Description("weak reference", parts=[("", value())]),  # a tf.function's `self`
    staticmethod: _wrapped("__func__"),
    classmethod: _wrapped("__func__"),
    functools.cached_property: _wrapped("func"),
    type(functools.lru_cache(lambda: None)): _wrapped("__wrapped__"),
}
