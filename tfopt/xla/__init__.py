"""XLA for a Keras model: on or off, decided by measuring both."""

from tfopt.xla.caching import PersistentCache, persistent_cache
from tfopt.xla.compilation import Compilation
from tfopt.xla.deciding import decide
from tfopt.xla.decision import JitDecision
from tfopt.xla.explaining import Explanation, explain
from tfopt.xla.obstacles import Obstacle
from tfopt.xla.toggles import jit, set_jit
from tfopt.xla.watching import Compilations, watch
from tfopt.xla.xla_flags import XlaFlags, flags

__all__ = [
    "Compilation",
    "Compilations",
    "Explanation",
    "JitDecision",
    "Obstacle",
    "PersistentCache",
    "XlaFlags",
    "decide",
    "explain",
    "flags",
    "jit",
    "persistent_cache",
    "set_jit",
    "watch",
]
