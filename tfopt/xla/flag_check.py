"""XLA flags tried on the installed XLA, which ends the process that has one it does not take."""

import difflib
import os
import subprocess
import sys
from collections.abc import Mapping

from tfopt.errors import UnsupportedError
from tfopt.xla.flag_text import line
from tfopt.xla.library import framework_library, mapped

# Run in a process of its own. It loads only the library that holds XLA's flags: a fifth of a second, and no GPU.
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


def knows(name: str) -> bool:
    """Whether the installed XLA has a flag of this name that takes a text.

    Raises:
        tfopt.errors.UnsupportedError: The installed XLA cannot be asked.
    """
    return _refusal({name: ""}) is None


def check(before: Mapping[str, str], asked: Mapping[str, str]) -> None:
    """Tries flags on the installed XLA.

    Args:
        before: Those that are set already.
        asked: Those to be set.

    Raises:
        ValueError: It does not take one that is asked for.
        tfopt.errors.UnsupportedError: It does not take one that was there before, or cannot be asked.
    """
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
            f"Expected a value that XLA takes for {name}. Received: {value!r}. What it takes is written in "
            "openxla/xla, xla/debug_options_flags.cc."
        )
    raise UnsupportedError(
        f"Expected XLA_FLAGS to hold flags that the installed XLA takes. Found: {line(before)!r}, over which XLA "
        "would end this process. Mend the environment variable, or unset it."
    )


def _refusal(values: Mapping[str, str]) -> str | None:
    """What XLA says as it ends a process that has these flags, or None where it takes them."""
    command = [sys.executable, "-I", "-c", _TRY, str(framework_library())]
    environment = {**os.environ, "XLA_FLAGS": line(values)}
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
    """Texts in the library that look like flags, to guess what was meant: most are flags."""
    names = set()
    with mapped(framework_library()) as content:
        at = content.find(b"\0xla_")
        while at >= 0:
            end = content.find(b"\0", at + 1)
            names.add(content[at + 1 : end].decode(errors="replace"))
            at = content.find(b"\0xla_", end)
    return names
