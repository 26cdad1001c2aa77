"""Describes functions: their code, defaults and closure, and what they name."""

import builtins
from collections.abc import Iterator
from dis import hasconst, opname
from types import CodeType, FunctionType
from typing import Any

from tfopt.pipelines.cache.fingerprint.description import Description, Part
from tfopt.pipelines.cache.fingerprint.modules import describe_import, follow, installed
from tfopt.pipelines.cache.fingerprint.names import Chain, Names, instructions, names_in
from tfopt.pipelines.cache.fingerprint.packages import by_name, package_of
from tfopt.pipelines.cache.fingerprint.values import named

_CONSTANT = frozenset(opname[code] for code in hasconst)
_HAS_DOCSTRING = 0x4000000  # a flag of Python 3.13
# What a class body says of itself; some of it from Python 3.13 on.
_COSMETIC = frozenset({"__doc__", "__firstlineno__", "__module__", "__qualname__", "__static_attributes__"})
# Attributes that decorators leave on a function, and that its own code does not read.
_LEFT_BY_DECORATORS = ("__", "_tf_", "ag_")


def describe_function(function: FunctionType) -> Description:
    """Describes a user's function by what it computes with; a package's by its name, and what it was made with."""
    code = function.__code__
    # Not __module__ and __qualname__: functools.wraps gives a wrapper those of another function.
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


def describe_code(code: CodeType) -> Description:
    """Describes bytecode with its constants in place; names of files, lines and docstrings are left out."""
    found = instructions(code)
    # A docstring is among the constants, and no instruction loads it.
    after = [*(item.argval for item in found[1:]), None]
    loads = [item.opname in _CONSTANT and name not in _COSMETIC for item, name in zip(found, after, strict=True)]
    steps = [item.opname if item.opname in _CONSTANT else f"{item.opname} {item.arg}" for item in found]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    # Not item.argval: Python 3.11 has none for the names of keywords.
    taken = [item.arg for item, load in zip(found, loads, strict=True) if load and item.arg is not None]
    constants = [("a constant", code.co_consts[number]) for number in taken]
    return Description("code", repr((counts, names, steps, code.co_exceptiontable)), constants)


def _defaults(function: FunctionType) -> Iterator[Part]:
    defaults = function.__defaults__ or ()
    code = function.__code__
    arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    values = [*zip(arguments, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    yield "", Description("defaults", parts=named(values, "default of `{}`"))


def _closure(function: FunctionType, names: Names) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            yield "", Description("empty cell")
        else:
            yield from _followed(f"closure variable `{name}`", value, names.locals.get(name, {()}))


def _named(function: FunctionType, names: Names) -> Iterator[Part]:
    """Yields what the globals and imports stand for."""
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
