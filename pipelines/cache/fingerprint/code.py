"""What programs define: functions by their code and what it names, classes by theirs, objects by class and state."""

import builtins
import contextlib
import dis
import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field
from itertools import islice, takewhile
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.fingerprint.modules import (
    Chain,
    Import,
    by_name,
    describe_import,
    follow,
    installed,
    package_of,
)
from tfopt.pipelines.cache.fingerprint.values import CONTENTS, Description, Part, RefusedError, named, reduced

_CONSTANT = frozenset(dis.opname[code] for code in dis.hasconst)
_HAS_DOCSTRING = 0x4000000  # a flag of Python 3.13
# What a class body says about itself; some of it only since Python 3.13.
_COSMETIC = frozenset({"__doc__", "__firstlineno__", "__module__", "__qualname__", "__static_attributes__"})
# Attributes that decorators leave on a function and its own code does not read.
_LEFT_BY_DECORATORS = ("__", "_tf_", "ag_")

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LOCAL = ("LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_NAMED_BY_CLASS_BODIES = frozenset({"__name__", "__qualname__", "__module__"})  # they only say which file it is

_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE; static types are compiled code
_COMPILED_METHODS = frozenset({"cython_function_or_method", "instancemethod", "nb_method"})  # instancemethod: pybind11
# What a compiled class, or one with __slots__, holds in place of functions.
_NATIVE = (
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
# Derived from the rest.
_DERIVED = frozenset(
    [
        *("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dataclass_params__"),
        *("__abstractmethods__", "__dict__", "__weakref__", "_abc_impl"),
    ]
)
_LEFT_OUT = _COSMETIC | _DERIVED


@dataclass(frozen=True, slots=True)
class Names:
    """What a code object and those inside it name."""

    # Names looked up in the module, with the attributes read from them. A class body inside the function adds its own.
    globals: dict[str, set[Chain]] = field(default_factory=lambda: defaultdict(set))
    locals: dict[str, set[Chain]] = field(default_factory=lambda: defaultdict(set))  # those of enclosing functions too
    imports: list[Import] = field(default_factory=list)


def describe_function(function: types.FunctionType) -> Description:
    """Describes a user's function by what it computes with; a package's by its name and what it was created with."""
    code = function.__code__
    # Not __module__ and __qualname__: functools.wraps copies another function's into a wrapper.
    module = function.__globals__.get("__name__", "")
    package = package_of(module)
    if package and by_name(function) and package_of(function.__module__):
        return installed(f"{function.__module__}.{function.__qualname__}", package)
    names = names_in(code)
    given = [*_defaults(function), *_closure(function, names)]
    if package:
        return Description("function", f"{module} {code.co_qualname} {code.co_firstlineno} {package}", given)
    own = {key: value for key, value in vars(function).items() if not key.startswith(_LEFT_BY_DECORATORS)}
    attributes = Description("attributes", parts=named(own.items(), "attribute `{}`"))
    return Description("function", "", [("", code), *given, ("", attributes), *_named(function, names)])


def describe_code(code: types.CodeType) -> Description:
    """Describes bytecode with its constants in place, without file names, line numbers and docstrings."""
    found = _instructions(code)
    # A docstring is among the constants, but no instruction loads it.
    after = [*(item.argval for item in found[1:]), None]
    loads = [item.opname in _CONSTANT and name not in _COSMETIC for item, name in zip(found, after, strict=True)]
    steps = [item.opname if item.opname in _CONSTANT else f"{item.opname} {item.arg}" for item in found]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    # Not item.argval: Python 3.11 has none for the names of keywords.
    taken = [item.arg for item, load in zip(found, loads, strict=True) if load and item.arg is not None]
    constants = [("a constant", code.co_consts[number]) for number in taken]
    return Description("code", repr((counts, names, steps, code.co_exceptiontable)), constants)


def names_in(code: types.CodeType) -> Names:
    """Returns what a code object and those inside it name.

    Example:
        >>> dict(names_in((lambda x: math.sin(x) + size).__code__).globals)
        {'math': {('sin',)}, 'size': {()}}
    """
    names, codes = Names(), [code]
    for each in codes:  # which grows meanwhile
        found = _instructions(each)
        cells = {*each.co_cellvars, *each.co_freevars}
        for index, item in enumerate(found):
            if item.opname in _GLOBAL and item.argval not in _NAMED_BY_CLASS_BODIES:
                names.globals[item.argval].add(_chain(found, index))
            elif item.opname == "IMPORT_NAME":
                names.imports.extend(_imports(found, index))
            elif item.opname.startswith(_LOCAL):
                *others, last = _loaded(item)
                for name, chain in [*((other, ()) for other in others), (last, _chain(found, index))]:
                    # Passing a cell on to an inner function does not use its value.
                    if "FAST" not in item.opname or name not in cells:
                        names.locals[name].add(chain)
        codes += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
    return names


def describe_class(kind: type) -> Description:
    """Describes a package's class by name, a user's by its bases, methods and attributes."""
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
    """Describes an object by its class and what it holds, without running code of the class."""
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


def _defaults(function: types.FunctionType) -> Iterator[Part]:
    defaults = function.__defaults__ or ()
    code = function.__code__
    arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    values = [*zip(arguments, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    yield "", Description("defaults", parts=named(values, "default of `{}`"))


def _closure(function: types.FunctionType, names: Names) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            yield "", Description("empty cell")
        else:
            yield from _followed(f"closure variable `{name}`", value, names.locals.get(name, {()}))


def _named(function: types.FunctionType, names: Names) -> Iterator[Part]:
    for name, chains in sorted(names.globals.items()):
        if name in function.__globals__:
            yield from _followed(f"global `{name}`", function.__globals__[name], chains)
        elif hasattr(builtins, name):
            yield "", installed(name, package_of("builtins") or "")
        else:
            yield "", Description("missing", name)
    package = function.__globals__.get("__package__") or ""
    for item in names.imports:
        chains = names.locals.get(item.local, set()) | names.globals.get(item.local, set())
        yield from describe_import(item, package, chains)


def _followed(step: str, value: Any, chains: set[Chain]) -> Iterator[Part]:
    return (follow(step, value, chain) for chain in sorted(chains))


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    """Returns the instructions, without those that only widen the argument of the next one."""
    return [item for item in dis.get_instructions(code) if item.opname not in ("EXTENDED_ARG", "CACHE")]


def _chain(found: list[dis.Instruction], index: int) -> Chain:
    read = takewhile(lambda item: item.opname in _ATTRIBUTE, islice(found, index + 1, None))
    return tuple(item.argval for item in read)


def _imports(found: list[dis.Instruction], index: int) -> Iterator[Import]:
    level, taken = found[index - 2].argval, found[index - 1].argval
    module: str = found[index].argval
    if taken:
        # IMPORT_FROM and the store of its name alternate.
        stores = [_stored(item) for item in found[index + 2 : index + 2 + 2 * len(taken) : 2]]
        yield from (Import(module, level, (name,), local) for name, local in zip(taken, stores, strict=True))
    elif found[index + 1].opname.startswith("STORE"):
        yield Import(module.partition(".")[0], level, (), _stored(found[index + 1]))
    else:  # import a.b as c
        yield Import(module, level, (), next(_stored(item) for item in found[index:] if item.opname[:5] == "STORE"))


def _loaded(item: dis.Instruction) -> tuple[str, ...]:
    """Returns the local names an instruction loads; since Python 3.12 some do two things at once."""
    if item.opname == "STORE_FAST_LOAD_FAST":
        return tuple(item.argval[1:])
    return item.argval if isinstance(item.argval, tuple) else (item.argval,)


def _stored(item: dis.Instruction) -> str:
    return str(item.argval[0] if isinstance(item.argval, tuple) else item.argval)


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


def _remembering(value: Any) -> Description:
    if value.cache_info().currsize and not package_of(vars(value).get("__module__") or ""):
        raise RefusedError(
            "a functools.lru_cache that remembers results, computed before what it reads may have changed"
        )
    return Description("lru_cache", parts=[("", value.__wrapped__)])


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
    type(functools.lru_cache(lambda: None)): _remembering,
}
