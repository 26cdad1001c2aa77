"""Real data and models to train on it, and the packages these need beyond tfopt itself."""

import importlib
import importlib.util
from types import ModuleType
from typing import NoReturn

from tfopt.errors import UnsupportedError


def require_all() -> None:
    """Raises `tfopt.errors.UnsupportedError` if a package that a run needs is missing."""
    for module in ("sklearn", "PIL", "jinja2"):
        if importlib.util.find_spec(module) is None:
            _missing(module, None)


def require(module: str) -> ModuleType:
    """Imports a module of the extra `bench`.

    Raises:
        tfopt.errors.UnsupportedError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        _missing(module, error)


def _missing(module: str, error: ImportError | None) -> NoReturn:
    raise UnsupportedError(
        f"Expected the packages of the extra 'bench'. Found no {module!r}. Run: pip install 'tfopt[bench]'"
    ) from error
