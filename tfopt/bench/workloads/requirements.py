"""What the workloads need beyond tfopt itself."""

import importlib
from types import ModuleType

from tfopt.errors import UnsupportedError


def require(module: str) -> ModuleType:
    """Imports a module of the extra `bench`.

    Raises:
        tfopt.errors.UnsupportedError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"Expected the packages of the extra 'bench'. Found no {module!r}. Run: pip install 'tfopt[bench]'"
        ) from error
