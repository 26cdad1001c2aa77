"""XLA's flags for this process."""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real

from tfopt.errors import UnsupportedError
from tfopt.xla.flag_check import check
from tfopt.xla.flag_text import line, read

# What `flags` has set while XLA could still read it.
_set_in_time: str | None = None


@dataclass(frozen=True, slots=True)
class XlaFlags:
    """The flags that XLA runs with in this process and in those that it starts.

    Attributes:
        in_force: Name → value, as XLA reads it. Flags not named here have XLA's defaults.
        replaced: Name → the value that the last call took back; empty where it took none back.
    """

    in_force: Mapping[str, str]
    replaced: Mapping[str, str]

    def to_dict(self) -> dict[str, dict[str, str]]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        was = {name: f" (was {value})" for name, value in self.replaced.items()}
        return ", ".join(f"{name}={value}{was.get(name, '')}" for name, value in self.in_force.items()) or "defaults"


def flags(**values: bool | int | float | str) -> XlaFlags:
    """Sets XLA flags for this process (the environment variable XLA_FLAGS), beside those that are set already.

    Call it first thing in a program: XLA reads its flags once, and an unknown one ends the process without a Python
    error. Each is tried on the installed XLA here, in another process. The environment stays changed: processes started
    afterwards inherit it. Without arguments it only says what is set.

    Args:
        **values: Flags by name, such as `xla_gpu_enable_cublaslt=True`. The last value given counts.

    Returns:
        The flags now in force, and what was replaced.

    Raises:
        ValueError: The installed XLA does not know a flag, or not that value for it, or it holds a null character.
        TypeError: A value is no bool, number or text.
        tfopt.errors.UnsupportedError: TensorFlow has started its devices, with which XLA may have read its flags;
            XLA_FLAGS holds what XLA cannot read; or the installed XLA cannot be asked.

    Example:
        >>> print(tfopt.xla.flags(xla_gpu_enable_cublaslt=True, xla_gpu_cudnn_gemm_fusion_level=2))
        xla_gpu_enable_cublaslt=true, xla_gpu_cudnn_gemm_fusion_level=2
    """
    global _set_in_time
    before = read(os.environ.get("XLA_FLAGS", ""))
    asked = {name: _text(name, value) for name, value in values.items()}
    replaced = {name: before[name] for name in asked if before.get(name, asked[name]) != asked[name]}
    text = line(before | asked)
    if asked and text != _set_in_time:
        check(before, asked)
        if devices_started():
            raise UnsupportedError(
                f"Expected XLA flags before TensorFlow starts its devices. Found them started: XLA may have read its "
                f"flags. Call tfopt.xla.flags(...) before the first tensor, dataset or model, or start Python with "
                f"XLA_FLAGS={text!r}."
            )
        os.environ["XLA_FLAGS"] = _set_in_time = text
    return XlaFlags(before | asked, replaced)


def devices_started() -> bool:
    """Whether TensorFlow has started its devices in this process, as the first tensor, dataset or model makes it do.

    On a CPU, XLA reads its flags with its first compilation, later than this. With a GPU other code may ask for them as
    soon as the device is there, and nothing in TensorFlow tells whether they have been read: this is the last moment
    that is certainly early enough.
    """
    module = sys.modules.get("tensorflow.python.eager.context")
    if module is None:
        return False
    context = getattr(module, "_context", True)
    return context is not None and getattr(context, "_initialized", True)


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError(
                f"Expected a text without null characters for {name}. Received: {value!r}. "
                "Take them out: an environment variable cannot hold them."
            )
        return value
    raise TypeError(
        f"Expected a bool, a number or a text for {name}. Received: {value!r} of type {type(value).__name__}. "
        "Give what stands behind the = on XLA's command line."
    )
