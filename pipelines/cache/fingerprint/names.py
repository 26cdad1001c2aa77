"""Finds what a function's code names: globals with the attributes asked of them, and imports inside the function."""

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType

Chain = tuple[str, ...]  # the attributes behind a name: ("image", "resize") behind `tf` in tf.image.resize(x)

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LOCAL = ("LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_NO_MATTER = frozenset({"__name__", "__qualname__", "__module__"})  # class bodies name them; the file is cosmetic


@dataclass(frozen=True, slots=True)
class Import:
    """An import inside a function.

    Args:
        module: The module's name behind `from` or `import`, without the dots of a relative import.
        level: The number of those dots.
        attributes: What is taken from the module.
        local: The name that it is bound to.
    """

    module: str
    level: int
    attributes: Chain
    local: str


@dataclass(frozen=True, slots=True)
class Names:
    """What a code and the functions inside it name.

    Args:
        globals: The names looked up in the module, with the chains behind them. In a class body inside the function,
            names of its own are among them.
        locals: The same of local names and those of enclosing functions.
        imports: The imports.
    """

    globals: dict[str, set[Chain]] = field(default_factory=dict)
    locals: dict[str, set[Chain]] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)


def names_in(code: CodeType) -> Names:
    """Returns what a code and the codes inside it name.

    Example:
        >>> names_in((lambda x: math.sin(x) + size).__code__).globals
        {'math': {('sin',)}, 'size': {()}}
    """
    names = Names()
    _collect(code, names)
    return names


def instructions(code: CodeType) -> list[dis.Instruction]:
    """Returns a code's instructions, without those that only widen the argument of the next."""
    return [item for item in dis.get_instructions(code) if item.opname not in ("EXTENDED_ARG", "CACHE")]


def _collect(code: CodeType, names: Names) -> None:
    found = instructions(code)
    cells = {*code.co_cellvars, *code.co_freevars}
    for index, item in enumerate(found):
        if item.opname in _GLOBAL and item.argval not in _NO_MATTER:
            names.globals.setdefault(item.argval, set()).add(_chain(found, index))
        elif item.opname == "IMPORT_NAME":
            names.imports.extend(_imports(found, index))
        elif item.opname.startswith(_LOCAL):
            *others, last = _loaded(item)
            for name, chain in [*((other, ()) for other in others), (last, _chain(found, index))]:
                # Handing a cell on to a function inside is no use of its value.
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
        # IMPORT_FROM and the store of its name follow in turn.
        stores = [_stored(item) for item in found[index + 2 : index + 2 + 2 * len(taken) : 2]]
        yield from (Import(module, level, (name,), local) for name, local in zip(taken, stores, strict=True))
    elif found[index + 1].opname.startswith("STORE"):
        yield Import(module.partition(".")[0], level, (), _stored(found[index + 1]))
    else:  # import a.b as c
        yield Import(module, level, (), next(_stored(item) for item in found[index:] if item.opname[:5] == "STORE"))


def _loaded(item: dis.Instruction) -> tuple[str, ...]:
    """Returns the local names that an instruction loads; some of Python 3.12 and later do two things at once."""
    if item.opname == "STORE_FAST_LOAD_FAST":
        return tuple(item.argval[1:])
    return item.argval if isinstance(item.argval, tuple) else (item.argval,)


def _stored(item: dis.Instruction) -> str:
    return str(item.argval[0] if isinstance(item.argval, tuple) else item.argval)
