"""Training on several GPUs and several machines: resolved, repaired, watched."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfopt.distribute.cluster import Cluster
    from tfopt.distribute.compression import compress_gradients
    from tfopt.distribute.paths import own_path
    from tfopt.distribute.resolving import resolve
    from tfopt.distribute.strategies import explain, strategy

# Loaded when asked for: the launcher and the watchdog do without TensorFlow.
_MODULES = {
    "Cluster": "cluster",
    "compress_gradients": "compression",
    "explain": "strategies",
    "own_path": "paths",
    "resolve": "resolving",
    "strategy": "strategies",
}

__all__ = ["Cluster", "compress_gradients", "explain", "own_path", "resolve", "strategy"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tfopt.distribute.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'tfopt.distribute' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
