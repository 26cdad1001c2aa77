"""How much TensorFlow logs of XLA's compilations, changed while it runs.

TensorFlow reads TF_CPP_VMODULE and TF_CPP_MIN_LOG_LEVEL once, when it loads. The functions of Abseil behind them stay
callable in its library: so nothing has to be asked for in advance, and nothing is logged while nobody watches.
"""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.xla.library import framework_library, mapped

# What the two source files report at these levels, once a compilation: its seconds; its name and the inputs' shapes.
_LEVELS = {b"device_compiler": 1, b"xla_compiler": 2}
_SEVERITIES = "IWEF"


class _StringView(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("text", ctypes.c_char_p))


class Verbosity:
    """Raises what TensorFlow logs of compilations to what `tfopt.xla.watch` reads, and puts it back.

    Attributes:
        hidden: The severities, among I, W, E, F, that the user does not see (TF_CPP_MIN_LOG_LEVEL).
        asked: Whether the user sees lines of compilations without us (TF_CPP_VMODULE).

    Raises:
        tfopt.errors.UnsupportedError: This TensorFlow's library does not offer the functions.
    """

    def __init__(self) -> None:
        self._abseil = _Abseil(framework_library())
        self._severity = self._abseil.min_severity()
        self._before = {module: self._abseil.level(module) for module in _LEVELS}
        self._raised = False
        self.hidden = _SEVERITIES[: self._severity]
        self.asked = not self.hidden and any(self._before.values())

    def up(self) -> None:
        """Raises it; does nothing where it is raised."""
        if not self._raised:
            self._raised = True
            self._set(0, {module: max(level, _LEVELS[module]) for module, level in self._before.items()})

    def down(self) -> None:
        """Puts it back as it was found; does nothing where it is."""
        if self._raised:
            self._raised = False
            self._set(self._severity, self._before)

    def _set(self, severity: int, levels: dict[bytes, int]) -> None:
        for module, level in levels.items():
            self._abseil.set_level(module, level)
        self._abseil.set_min_severity(severity)


class _Abseil:
    """Abseil's log settings. A name in the library spells out the argument types, so a call cannot mistake them."""

    def __init__(self, library: Path):
        prefix, loaded = _prefix(library), ctypes.CDLL(str(library))
        view, integer = _StringView, ctypes.c_int
        text = "ESt17basic_string_viewIcSt11char_traitsIcEE"

        def function(name: str, result: type | None, *arguments: type) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)((prefix + name, loaded))

        try:
            self.min_severity = function("11MinLogLevelEv", integer)
            self.set_min_severity = function("14SetMinLogLevelENS0_18LogSeverityAtLeastE", None, integer)
            self._level = function(f"12log_internal9VLogLevel{text}", integer, view)
            self._set_level = function(f"12log_internal14PrependVModule{text}i", integer, view, integer)
        except AttributeError as error:
            raise _unsupported(library) from error

    def level(self, module: bytes) -> int:
        return int(self._level(_StringView(len(module), module)))

    def set_level(self, module: bytes, level: int) -> None:
        self._set_level(_StringView(len(module), module), level)


@functools.cache
def _prefix(library: Path) -> str:
    """How the names of Abseil's functions begin: they carry its release, which differs between TensorFlow's."""
    with mapped(library) as content:
        found = re.search(rb"(_ZN4absl\d+lts_\d+)12log_internal14PrependVModule", content)
        if found:
            return found[1].decode()
    raise _unsupported(library)


def _unsupported(library: Path) -> UnsupportedError:
    return UnsupportedError(
        f"Expected Abseil's log settings in {library.name}. Found: TensorFlow {tf.__version__} without them. "
        "Go by tfopt.xla.watch()'s signatures, or use TensorFlow 2.21."
    )
