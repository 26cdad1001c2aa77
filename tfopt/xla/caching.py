"""XLA's autotuning kept between processes."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.hardware import gpus
from tfopt.xla.flag_check import knows
from tfopt.xla.xla_flags import flags

# XLA has two autotuners, for some time side by side; each has its flag, and both write files of one form.
_FLAGS = ("xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_experimental_autotuner_cache_dir")


@dataclass(frozen=True, slots=True)
class PersistentCache:
    """Where XLA keeps what autotuning found.

    Attributes:
        folder: Of this TensorFlow build, inside the folder given.
        used: Whether there is a GPU, for which alone XLA autotunes.
    """

    folder: Path
    used: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {"folder": str(self.folder), "used": self.used}

    def __str__(self) -> str:
        if self.used:
            return f"XLA keeps what autotuning finds in {self.folder}"
        return f"XLA would keep what autotuning finds in {self.folder}; without a GPU it autotunes nothing"


def persistent_cache(folder: str | PathLike[str]) -> PersistentCache:
    """Makes XLA keep what autotuning finds, so that the next process with the same model starts sooner.

    Call it first thing in a program that trains under XLA on a GPU, where the first step times many variants of each
    kernel. It sets XLA flags (see `flags`) and does nothing on a CPU. Code is compiled anew all the same. Several
    processes may share the folder. XLA tells GPUs and cuDNN versions apart, but not its own versions: each build of
    TensorFlow gets a folder of its own inside (https://openxla.org/xla/persisted_autotuning). Empty it after a change
    of driver or of other CUDA libraries, or the choices may no longer be the fastest.

    Args:
        folder: Made where it is missing. One that outlives the process: a local or shared disk.

    Returns:
        Where the files are, and whether this machine has a GPU to use them.

    Raises:
        TypeError: `folder` is no path.
        ValueError: It is empty, holds a null character, or begins with the ~ of an unknown user.
        tfopt.errors.UnsupportedError: The folder cannot be written, the installed XLA has no such cache, or TensorFlow
            has started its devices.

    Example:
        >>> print(tfopt.xla.persistent_cache("~/.cache/xla"))
        XLA keeps what autotuning finds in /home/me/.cache/xla/tensorflow-2.21.0-v2.21.0
    """
    names = [name for name in _FLAGS if knows(name)]
    if not names:
        raise UnsupportedError(
            f"Expected an XLA that keeps autotuning results ({_FLAGS[0]}). Found that the installed one does not. "
            "Go on without a cache, or install another TensorFlow."
        )
    place = _path(folder) / _build()
    with _unmade_when_refused(place):
        _make(place)
        flags(**dict.fromkeys(names, str(place)))
    return PersistentCache(place, used=bool(gpus()))


def _build() -> str:
    return re.sub(r"[^\w.-]", "_", f"tensorflow-{tf.version.VERSION}-{tf.version.GIT_VERSION}")


def _path(folder: str | PathLike[str]) -> Path:
    if not isinstance(folder, str | PathLike) or not isinstance(os.fspath(folder), str):
        raise TypeError(
            f"Expected a folder as a str or Path. Received: {folder!r} of type {type(folder).__name__}. "
            'Give one that outlives the process, such as "~/.cache/xla".'
        )
    text = os.fspath(folder)
    if not text or "\0" in text:
        raise ValueError(f'Expected the path of a folder. Received: {text!r}. Give one, such as "~/.cache/xla".')
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(
            f"Expected a folder whose ~ names a user of this machine. Received: {text!r}. Write its path out."
        ) from error


@contextlib.contextmanager
def _unmade_when_refused(folder: Path) -> Iterator[None]:
    """Leaves no new folder behind where the block raises."""
    new = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # another process uses it by now, or it was never made
            for part in new:
                part.rmdir()
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UnsupportedError(
            f"Expected a folder that can be written. Found: {error}. Give another one, or its owner's permission."
        ) from error
