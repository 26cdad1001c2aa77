"""Functions: their code, defaults and closure, and everything their code names."""

import builtins
import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from tfopt.pipelines.cache.fingerprint.modules import (
    Chain,
    Import,
    by_name,
    describe_import,
    follow,
    installed,
    package_of,
)
from tfopt.pipelines.cache.fingerprint.values import Description, Part, named

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


@dataclass(frozen=True, slots=True)
class Names:
    """What a code object and those inside it name."""

    # Names looked up in the module, with the attributes read from them. A class body inside the function adds its own.
    globals: dict[str, set[Chain]] = field(default_factory=dict)
    locals: dict[str, set[Chain]] = field(default_factory=dict)  # those of enclosing functions too
    imports: list[Import] = field(default_factory=list)


def describe_function(function: FunctionType) -> Description:
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


def describe_code(code: CodeType) -> Description:
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


def names_in(code: CodeType) -> Names:
    """Returns what a code object and those inside it name.

    Example:
        >>> names_in((lambda x: math.sin(x) + size).__code__).globals
        {'math': {('sin',)}, 'size': {()}}
    """
    names = Names()
    _collect(code, names)
    return names


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


def _instructions(code: CodeType) -> list[dis.Instruction]:
    """Returns the instructions, without those that only widen the argument of the next one."""
    return [item for item in dis.get_instructions(code) if item.opname not in ("EXTENDED_ARG", "CACHE")]


def _collect(code: CodeType, names: Names) -> None:
    found = _instructions(code)
    cells = {*code.co_cellvars, *code.co_freevars}
    for index, item in enumerate(found):
        if item.opname in _GLOBAL and item.argval not in _NAMED_BY_CLASS_BODIES:
            names.globals.setdefault(item.argval, set()).add(_chain(found, index))
        elif item.opname == "IMPORT_NAME":
            names.imports.extend(_imports(found, index))
        elif item.opname.startswith(_LOCAL):
            *others, last = _loaded(item)
            for name, chain in [*((other, ()) for other in others), (last, _chain(found, index))]:
                # Passing a cell on to an inner function does not use its value.
                if "FAST" not in item.opname or name not in cells:
                    names.locals.setdefault(name, set()).add(chain)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _collect(constant, names)


def _chain(found: list[dis.Instruction], index: int) -> Chain:
    end = index + 1
    while end < len(found) and found[end].opname in _ATTRIBUTE:
        end += 1
    return tuple(item.argval for item in found[index + 1 : end])


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
