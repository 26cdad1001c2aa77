"""Modules: whose they are (Python's, a package's, the user's), and what a name reaches through them.

A package's code counts by its release, the user's by its content. Nothing is imported.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from tfopt.pipelines.cache.fingerprint.values import Description, Part, RefusedError, named

_INSTALLED = ("site-packages", "dist-packages")
_CODE = (".py", ".so", ".pyd", ".dylib")

Chain = tuple[str, ...]  # the attributes after a name: ("image", "resize") after `tf` in tf.image.resize(x)


@dataclass(frozen=True, slots=True)
class Import:
    """An import inside a function."""

    module: str  # without the dots of a relative import
    level: int  # the number of those dots
    attributes: Chain  # what is taken from the module
    local: str  # the name it is bound to


def package_of(module: str) -> str | None:
    """Returns the release a module belongs to, with a hash of its files; None for a module of the user's own.

    Such as "numpy 2.1.0 4f2a…"; None also for a module that exists nowhere. The version alone is not enough: a package
    installed from a checkout seldom gets a new one.
    """
    top = module.partition(".")[0]
    origin = _origin(sys.modules.get(module)) or _origin(sys.modules.get(top)) or _found(top)
    if origin is None:
        return None
    if origin in ("built-in", "frozen") or _in_python(origin):
        return f"{platform.python_implementation()} {platform.python_version()}"
    return _installed(top) if _among_packages(origin) else None


def by_name(value: Any) -> bool:
    """Whether a function or class can be found in its module under its own name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found is value


def installed(name: str, package: str) -> Description:
    """Describes something Python or a package provides, by its full name and what `package_of` returned."""
    return Description("installed", f"{name} {package}")


def describe_module(module: ModuleType) -> Description:
    """Describes a module used as a whole: a package's by name, the user's by everything it holds."""
    package = package_of(_name(module))
    if package:
        return installed(_name(module), package)
    own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return Description("module", parts=named(own.items()))


def follow(step: str, value: Any, chain: Chain) -> Part:
    """Follows attributes through the user's modules to the first value that is not one of those modules.

    Raises RefusedError if an attribute is a module that is not loaded.
    """
    while issubclass(type(value), ModuleType):
        name = _name(value)
        package = package_of(name)
        if package:
            return step, installed(".".join((name, *chain)), package)
        if not chain:
            break
        attribute, chain = chain[0], chain[1:]
        step += f" → `{attribute}`"
        if attribute in vars(value):
            value = vars(value)[attribute]
        elif is_loaded(f"{name}.{attribute}"):
            value = sys.modules[f"{name}.{attribute}"]
        else:
            # The module's own __getattr__ may answer.
            return step, Description("missing", attribute, [("`__getattr__`", vars(value).get("__getattr__"))])
    return step, value


def describe_import(item: Import, package: str, chains: set[Chain]) -> Iterator[Part]:
    """Yields what an import inside a function of `package` stands for, given the attributes read from its name.

    Raises RefusedError if it is a module of the user's that is not loaded.
    """
    name = item.module
    if item.level:
        name = importlib.util.resolve_name("." * item.level + name, package)
    step, found = f"import of `{name}`", package_of(name)
    if found:
        yield step, installed(".".join((name, *item.attributes)), found)
    elif not is_loaded(name):
        yield step, Description("missing", name)
    else:
        yield from (follow(step, sys.modules[name], (*item.attributes, *chain)) for chain in sorted(chains))


def is_loaded(name: str) -> bool:
    """Whether a module of the user's is loaded; False if it does not exist.

    If it exists and is not loaded, raises RefusedError: only running it would show its content.
    """
    for part in accumulate(name.split("."), "{}.{}".format):
        if part not in sys.modules:
            if _exists(part):
                raise RefusedError(f"the module {name}, which is not loaded yet (import it at the top of the file)")
            return False
    return sys.modules[name] is not None


def _exists(name: str) -> bool:
    """Whether a module could be imported, given that its parent package is loaded."""
    parent = sys.modules.get(name.rpartition(".")[0])
    # Ask the namespace: find_spec would run the user's module-level __getattr__.
    if parent is not None and "__path__" not in vars(parent):
        return False
    return _spec(name) is not None


def _name(module: ModuleType) -> str:
    # Not module.__name__: TensorFlow's lazy Keras has none and raises an error.
    names = vars(module)
    return str(names.get("__name__") or names.get("_tfll_name", ""))


def _origin(module: ModuleType | None) -> str | None:
    """Returns a loaded module's file, or the first folder of a package without an `__init__`."""
    if module is None:
        return None
    # The namespace itself: some modules load others, or fail, when asked for an attribute.
    names = vars(module)
    file = names.get("__file__") or next(iter(names.get("__path__") or ()), None)
    return str(file) if file else getattr(names.get("__spec__"), "origin", None)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: __main__ has no spec
        return None


def _found(top: str) -> str | None:
    """Returns the same for a module that is not loaded."""
    spec = _spec(top)
    return (spec.origin or next(iter(spec.submodule_search_locations or ()), None)) if spec else None


@functools.cache
def _in_python(file: str) -> bool:
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    inside = any(
        path.startswith(start(folder) + os.sep)
        for folder in folders
        for start in (str, os.path.realpath)
        for path in (file, os.path.realpath(file))
    )
    return inside and not any(part in _INSTALLED for part in file.split(os.sep))


@functools.cache
def _among_packages(file: str) -> bool:
    """Whether a file lies in a folder of installed packages, be it one of the user's choice: `pip install --target`."""
    folders, imported_from = Path(file).parents, {Path(entry) for entry in sys.path if entry}
    return any(
        folder.name in _INSTALLED or (folder in imported_from and any(folder.glob("*.dist-info/RECORD")))
        for folder in folders
    )


@functools.cache
def _installed(top: str) -> str | None:
    """Returns the releases of the installed packages that own a top-level name."""
    try:
        distribution = importlib.metadata.distribution(top)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    # Most packages bear the name of what they provide; that spares reading all packages' file lists (50 to 500 ms).
    if distribution and f"\n{top}/__init__.py," in (distribution.read_text("RECORD") or ""):
        return _release(distribution)
    names = importlib.metadata.packages_distributions().get(top, [])
    return "; ".join(_release(importlib.metadata.distribution(name)) for name in sorted(set(names))) or None


def _release(distribution: importlib.metadata.Distribution) -> str:
    lines = (distribution.read_text("RECORD") or "").splitlines()
    code = sorted(line for line in lines if line.partition(",")[0].endswith(_CODE))
    return f"{distribution.name} {distribution.version} {hashlib.sha256(chr(10).join(code).encode()).hexdigest()}"
