"""Sets XLA's flags for this process, after trying them in another."""

import difflib
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from pathlib import Path

import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.hardware.gpu_memory import devices_started
from tfopt.text import Shown

# What `flags` set while XLA could still read it.
_set_in_time: str | None = None
# XLA's own syntax: --name, --name=value or --name="quoted value", separated by spaces.
_FLAG = re.compile(r"""\s*--([\w-]+)(?:=("(?:\\.|[^"\\])*"|'[^']*'|\S*))?(?=\s|$)""")
# Runs in a separate process, because a bad flag makes XLA end its process. It loads only the library that holds XLA's
# flags, which takes 0.2 s and no GPU.
_TRY = """
import ctypes, os, sys
try:
    read = ctypes.CDLL(sys.argv[1])._ZN3xla28ParseDebugOptionFlagsFromEnvEb
except (OSError, AttributeError) as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(3)
read(ctypes.c_bool(False))
os._exit(0)
"""
_CANNOT_TELL = 3
_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, slots=True, repr=False)
class XlaFlags(Shown):
    """The flags XLA runs with in this process and its children."""

    in_force: Mapping[str, str]
    """Flag → value, as XLA reads it. Other flags have XLA's defaults."""
    replaced: Mapping[str, str]
    """Flag → previous value, for flags that this call overwrote."""

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Returns JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        was = {name: f" (was {value})" for name, value in self.replaced.items()}
        return ", ".join(f"{name}={value}{was.get(name, '')}" for name, value in self.in_force.items()) or "defaults"


def flags(**values: bool | int | float | str) -> XlaFlags:
    """Adds XLA flags to the environment variable XLA_FLAGS of this process.

    Call it first thing in a program: XLA reads its flags once, and an unknown flag ends the process without a Python
    error, so each flag is tried in another process first. Child processes inherit the flags. Without arguments, it only
    reports what is set.

    Args:
        **values: Flags by name, such as `xla_gpu_enable_cublaslt=True`. A later call overwrites an earlier value.

    Returns:
        The flags now in force, and the values replaced.

    Raises:
        ValueError: If the installed XLA does not know a flag or rejects its value, or a value holds a null character.
        TypeError: If a value is not a bool, a number or a string.
        tfopt.errors.UnsupportedError: If TensorFlow has started its devices, XLA cannot read the current XLA_FLAGS, or
            the flags cannot be tried.

    Example:
        >>> print(tfopt.xla.flags(xla_gpu_enable_cublaslt=True, xla_gpu_cudnn_gemm_fusion_level=2))
        xla_gpu_enable_cublaslt=true, xla_gpu_cudnn_gemm_fusion_level=2
    """
    global _set_in_time
    before = parse(os.environ.get("XLA_FLAGS", ""))
    asked = {name: _text(name, value) for name, value in values.items()}
    replaced = {name: before[name] for name in asked if before.get(name, asked[name]) != asked[name]}
    text = format_flags(before | asked)
    if asked and text != _set_in_time:
        _check(before, asked)
        # On a CPU, XLA reads its flags later, at its first compilation. On a GPU, other code may read them as soon as
        # the device exists, and TensorFlow does not say whether it has. So this is the last safe moment.
        if devices_started() is not False:
            raise UnsupportedError(
                f"Expected XLA flags before TensorFlow starts its devices. Found: they have started, and XLA may "
                f"have read its flags. Call tfopt.xla.flags(...) before the first tensor, dataset or model, or start "
                f"Python with XLA_FLAGS={text!r}."
            )
        os.environ["XLA_FLAGS"] = _set_in_time = text
    return XlaFlags(before | asked, replaced)


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
                f"Expected a string without null characters for {name}. Received: {value!r}. "
                "Remove them; an environment variable cannot hold them."
            )
        return value
    raise TypeError(
        f"Expected a bool, a number or a string for {name}. Received: {value!r} of type {type(value).__name__}. "
        "Pass what follows the = on XLA's command line."
    )


def parse(text: str) -> dict[str, str]:
    """Parses XLA_FLAGS as XLA does; returns name → value.

    Raises:
        tfopt.errors.UnsupportedError: If XLA would stop reading before the end.
    """
    found: dict[str, str] = {}
    at = 0
    while match := _FLAG.match(text, at):
        found[match[1]] = "true" if match[2] is None else _unquoted(match[2])
        at = match.end()
    if text[at:].strip():
        raise UnsupportedError(
            f"Expected XLA_FLAGS to hold flags, --name=value separated by spaces. Found {text[at:].strip()!r}, where "
            "XLA stops reading (it takes a value without -- for the name of a file of flags). "
            "Fix the environment variable, or unset it."
        )
    return found


def _unquoted(value: str) -> str:
    if value.startswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value[1:-1] if value.startswith("'") else value


def format_flags(values: Mapping[str, str]) -> str:
    """Formats flags as XLA_FLAGS."""
    return " ".join(f"--{name}={_quoted(value)}" for name, value in values.items())


def _quoted(value: str) -> str:
    """Quotes a value that holds a space or begins with a quote."""
    if re.search(r"\s|^[\"']", value):
        return '"{}"'.format(re.sub(r'(["\\])', r"\\\1", value))
    return value


def knows(name: str) -> bool:
    """Whether the installed XLA has a string flag of this name; raises UnsupportedError if it cannot be tried."""
    return _refusal({name: ""}) is None


def _check(before: Mapping[str, str], asked: Mapping[str, str]) -> None:
    """Tries the new flags together with those already set; raises as `flags` does."""
    if _refusal({**before, **asked}) is None:
        return
    for name, value in asked.items():
        refusal = _refusal({name: value})
        if refusal is None:
            continue
        if "Unknown flag" in refusal:
            near = difflib.get_close_matches(name, _names(), n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else "Its flags change with each release."
            raise ValueError(
                f"Expected a flag of the installed XLA. Received: {name!r}, which it does not know. {hint}"
            )
        raise ValueError(
            f"Expected a value that XLA accepts for {name}. Received: {value!r}. They are listed in openxla/xla, "
            "xla/debug_options_flags.cc."
        )
    raise UnsupportedError(
        f"Expected XLA_FLAGS to hold flags that the installed XLA accepts. Found: {format_flags(before)!r}, for "
        "which XLA would end this process. Fix the environment variable, or unset it."
    )


def _refusal(values: Mapping[str, str]) -> str | None:
    """What XLA prints when it rejects these flags; None if it accepts them."""
    command = [sys.executable, "-I", "-c", _TRY, str(_library())]
    environment = {**os.environ, "XLA_FLAGS": format_flags(values)}
    try:
        tried = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot_ask(str(error)) from error
    if tried.returncode == _CANNOT_TELL:
        raise _cannot_ask(tried.stderr.strip().splitlines()[-1])
    return None if tried.returncode == 0 else tried.stderr


def _cannot_ask(cause: str) -> UnsupportedError:
    return UnsupportedError(
        f"Expected to ask the installed XLA for its flags. Found: {cause}. "
        "Start Python with the environment variable XLA_FLAGS set instead."
    )


def _names() -> set[str]:
    """Strings in the library that look like flags, for suggestions."""
    with _library().open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name.decode(errors="replace") for name in re.findall(rb"\0(xla_[^\0]*)", content)}


def _library() -> Path:
    """TensorFlow's library with XLA's flags."""
    found = sorted(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*"))
    if not found:
        raise UnsupportedError(
            f"Expected libtensorflow_framework in {tf.sysconfig.get_lib()}. Found: none. Use TensorFlow for Linux."
        )
    return found[0]
