"""TensorFlow's framework library, and the log settings of Abseil inside it.

TensorFlow reads TF_CPP_VMODULE and TF_CPP_MIN_LOG_LEVEL only when it loads. The Abseil functions behind them can be
called in its library at any time, so nothing has to be set in advance, and nothing is logged while nobody watches.
"""

import ctypes
import functools
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedError

# Source files and the levels at which they log each compilation: its seconds; its name and the shapes of its inputs.
_LEVELS = {b"device_compiler": 1, b"xla_compiler": 2}
_SEVERITIES = "IWEF"


def framework_library() -> Path:
    """Returns the path of the library with TensorFlow's log settings and XLA's flags, or raises UnsupportedError."""
    found = sorted(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*"))
    if not found:
        raise UnsupportedError(
            f"Expected libtensorflow_framework in {tf.sysconfig.get_lib()}. Found: none. Use TensorFlow for Linux."
        )
    return found[0]


@contextmanager
def mapped(library: Path) -> Iterator[mmap.mmap]:
    """Maps the library's bytes for searching."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


class _StringView(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("text", ctypes.c_char_p))


class Verbosity:
    """Makes TensorFlow log compilations for `tfopt.xla.watch`, and restores its log settings.

    Raises:
        tfopt.errors.UnsupportedError: If this TensorFlow's library does not export the functions.
    """

    hidden: str
    """Severities, among I, W, E, F, that the user does not see (TF_CPP_MIN_LOG_LEVEL)."""
    asked: bool
    """Whether the user sees the compiler's lines anyway (TF_CPP_VMODULE)."""

    def __init__(self) -> None:
        self._abseil = _Abseil(framework_library())
        self._severity = self._abseil.min_severity()
        self._before = {module: self._abseil.level(module) for module in _LEVELS}
        self.hidden = _SEVERITIES[: self._severity]
        self.asked = not self.hidden and any(self._before.values())

    def up(self) -> None:
        """Logs compilations from now on."""
        self._set_levels({module: max(level, _LEVELS[module]) for module, level in self._before.items()})
        self._abseil.set_min_severity(0)

    def down(self) -> None:
        """Restores the original settings."""
        self._set_levels(self._before)
        self._abseil.set_min_severity(self._severity)

    def _set_levels(self, levels: dict[bytes, int]) -> None:
        for module, level in levels.items():
            self._abseil.set_level(module, level)


class _Abseil:
    """Abseil's log settings. A symbol's name contains its argument types, so a call cannot get them wrong."""

    def __init__(self, library: Path):
        prefix, loaded = _prefix(library), ctypes.CDLL(str(library))
        view, integer = _StringView, ctypes.c_int
        text = "ESt17basic_string_viewIcSt11char_traitsIcEE"

        def function(name: str, result: type | None, *arguments: type) -> Any:
            return ctypes.PYFUNCTYPE(result, *arguments)((prefix + name, loaded))  # keeps the GIL, which is quicker

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
    """Common prefix of Abseil's symbols, which contains the release of Abseil in this TensorFlow."""
    with mapped(library) as content:
        found = re.search(rb"(_ZN4absl\d+lts_\d+)12log_internal14PrependVModule", content)
        if found:
            return found[1].decode()
    raise _unsupported(library)


def _unsupported(library: Path) -> UnsupportedError:
    return UnsupportedError(
        f"Expected Abseil's log settings in {library.name}. Found: TensorFlow {tf.__version__} without them. "
        "Use the signatures that tfopt.xla.watch() counts instead, or TensorFlow 2.21."
    )
