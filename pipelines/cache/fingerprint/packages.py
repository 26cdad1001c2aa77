"""Tells the modules of Python and of installed packages from the user's own, and names the former's state."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import sysconfig
from types import ModuleType
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_CODE = (".py", ".so", ".pyd", ".dylib")


def package_of(module: str) -> str | None:
    """Returns what settles the code of a module: its package, the version and a hash of the files that came with it.

    The version alone would not do: whoever installs a package of their own from a checkout seldom raises it.

    Args:
        module: The name of a module, loaded or not.

    Returns:
        Such as "numpy 2.1.0 4f2a…"; None for a module of the user's own, also for one that exists nowhere.
    """
    top = module.partition(".")[0]
    origin = _origin(sys.modules.get(module)) or _origin(sys.modules.get(top)) or _found(top)
    if origin is None:
        return None
    if origin in ("built-in", "frozen") or _in_python(origin):
        return f"{platform.python_implementation()} {platform.python_version()}"
    return _installed(top) if any(part in _INSTALLED for part in origin.split(os.sep)) else None


def by_name(value: Any) -> bool:
    """Whether a function or class lies in its module under its own name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found is value


def _origin(module: ModuleType | None) -> str | None:
    """Returns a loaded module's file; of a package without an `__init__`, its first folder."""
    if module is None:
        return None
    # The namespace itself: some modules load others, or fail, when an attribute is asked for.
    names = vars(module)
    file = names.get("__file__") or next(iter(names.get("__path__") or ()), None)
    return str(file) if file else getattr(names.get("__spec__"), "origin", None)


def _found(top: str) -> str | None:
    """Returns the same of a module that is not loaded."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: __main__ has no spec
        return None
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
def _installed(top: str) -> str | None:
    """Returns the releases of the installed packages that a top-level name belongs to."""
    try:
        distribution = importlib.metadata.distribution(top)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    # Most are called as what they bring, which spares reading the lists of all packages (50 to 500 ms).
    if distribution and f"\n{top}/__init__.py," in (distribution.read_text("RECORD") or ""):
        return _release(distribution)
    names = importlib.metadata.packages_distributions().get(top, [])
    return "; ".join(_release(importlib.metadata.distribution(name)) for name in sorted(set(names))) or None


def _release(distribution: importlib.metadata.Distribution) -> str:
    lines = (distribution.read_text("RECORD") or "").splitlines()
    code = sorted(line for line in lines if line.partition(",")[0].endswith(_CODE))
    return f"{distribution.name} {distribution.version} {hashlib.sha256(chr(10).join(code).encode()).hexdigest()}"
