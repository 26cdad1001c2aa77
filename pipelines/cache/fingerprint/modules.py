"""Describes what names lead to through modules, and modules themselves; nothing is imported."""

import importlib.util
import sys
from collections.abc import Iterator
from itertools import accumulate
from types import ModuleType
from typing import Any

from tfopt.pipelines.cache.fingerprint.description import Description, Part, RefusedError
from tfopt.pipelines.cache.fingerprint.names import Chain, Import
from tfopt.pipelines.cache.fingerprint.packages import package_of
from tfopt.pipelines.cache.fingerprint.values import named


def installed(name: str, package: str) -> Description:
    """Describes what Python or a package brings.

    Args:
        name: Its name, with the module's.
        package: What `package_of` returned.
    """
    return Description("installed", f"{name} {package}")


def describe_module(module: ModuleType) -> Description:
    """Describes a module that is used as a whole: a package's by name, the user's by all that it holds."""
    package = package_of(_name(module))
    if package:
        return installed(_name(module), package)
    own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return Description("module", parts=named(own.items()))


def follow(step: str, value: Any, chain: Chain) -> Part:
    """Returns what attributes lead to, through the user's modules up to the first value that is no such module.

    Args:
        step: How the value is reached.
        value: Where to begin; the attributes count only if it is a module.
        chain: The attributes.

    Raises:
        RefusedError: An attribute is a module that is not loaded.
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
            # A module may answer for what it does not hold.
            return step, Description("missing", attribute, [("`__getattr__`", vars(value).get("__getattr__"))])
    return step, value


def describe_import(item: Import, package: str, chains: set[Chain]) -> Iterator[Part]:
    """Yields what an import inside a function stands for.

    Args:
        item: The import.
        package: The package of the function's module, for relative imports.
        chains: The attributes that are asked of what it binds.

    Raises:
        RefusedError: It is a module of the user's that is not loaded.
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
    """Whether a module of the user's is loaded; False for one that does not exist.

    Raises:
        RefusedError: It exists and is not loaded: it could only be read by running it.
    """
    for part in accumulate(name.split("."), "{}.{}".format):
        if part not in sys.modules:
            if _exists(part):
                raise RefusedError(f"the module {name}, which is not loaded yet (import it at the top of the file)")
            return False
    return sys.modules[name] is not None


def _exists(name: str) -> bool:
    """Whether a module could be imported, given that the package that it is in is loaded."""
    parent = sys.modules.get(name.rpartition(".")[0])
    # Asked of the namespace: find_spec would run the user's module-level __getattr__.
    if parent is not None and "__path__" not in vars(parent):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _name(module: ModuleType) -> str:
    # Not module.__name__: TensorFlow's lazy Keras has none, and raises an error.
    names = vars(module)
    return str(names.get("__name__") or names.get("_tfll_name", ""))
