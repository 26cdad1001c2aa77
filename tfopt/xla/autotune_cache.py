"""Keeps XLA's autotuning results between processes."""

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
from tfopt.text import Shown
from tfopt.warn import warn_once
from tfopt.xla.xla_flags import flags, knows, parse

# XLA is replacing its autotuner and for now has both. Each has its own flag; they write the same format.
_FLAGS = ("xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_experimental_autotuner_cache_dir")


@dataclass(frozen=True, slots=True, repr=False)
class PersistentCache(Shown):
    """Where XLA keeps its autotuning results."""

    folder: Path
    """Folder of this TensorFlow build, inside the folder passed to `persistent_cache`."""
    used: bool
    """Whether there is a GPU. XLA autotunes nothing else."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"folder": str(self.folder), "used": self.used}

    def __str__(self) -> str:
        if self.used:
            return f"XLA keeps autotuning results in {self.folder}"
        return f"XLA would keep autotuning results in {self.folder}; without a GPU it autotunes nothing"


def persistent_cache(folder: str | PathLike[str]) -> PersistentCache:
    """Keeps XLA's autotuning results on disk, so that the next process with the same model starts sooner.

    Call it first thing in a program that trains under XLA on a GPU, where the first step times many variants of each
    kernel. It sets XLA flags (see `flags`), which have no effect on a CPU. Code is still compiled in every process.
    Several processes may share the folder. XLA tells GPUs and cuDNN versions apart but not its own versions, so each
    TensorFlow build gets a subfolder (https://openxla.org/xla/persisted_autotuning). Empty the folder after changing
    the driver or other CUDA libraries: its choices may no longer be the fastest.

    Args:
        folder: A folder that outlives the process, on a local or shared disk. Created if missing.

    Returns:
        Where the files are, and whether this machine has a GPU to use them.

    Raises:
        TypeError: If `folder` is not a path.
        ValueError: If `folder` is empty, holds a null character, or begins with the ~ of an unknown user.
        tfopt.errors.UnsupportedError: If the folder cannot be written, the installed XLA has no such cache, or
            TensorFlow has started its devices.

    Example:
        >>> print(tfopt.xla.persistent_cache("~/.cache/xla"))
        XLA keeps autotuning results in /home/me/.cache/xla/tensorflow-2.21.0-v2.21.0
    """
    names = [name for name in _FLAGS if knows(name)]
    if not names:
        raise UnsupportedError(
            f"Expected an XLA with {_FLAGS[0]}. Found: the installed one does not have it. "
            "Continue without a cache, or install another TensorFlow."
        )
    place = _path(folder) / _build()
    with _removed_on_error(place):
        _make(place)
        flags(**dict.fromkeys(names, str(place)))
    return PersistentCache(place, used=bool(gpus()))


def share_cache(folder: str | PathLike[str] | None = None) -> PersistentCache | None:
    """Sets up `persistent_cache` for child processes, such as those in which tfopt-bench measures.

    A cache that XLA_FLAGS already names is kept, so that a program shares one with those it starts.

    Args:
        folder: As for `persistent_cache`. None: `tfopt/xla` in the user's cache folder.

    Returns:
        The cache. None, with nothing changed, if there is no GPU or the installed XLA cannot have a cache.
    """
    if not gpus():
        return None
    try:
        named = [path for name, path in parse(os.environ.get("XLA_FLAGS", "")).items() if name in _FLAGS]
        if named:
            return PersistentCache(Path(named[0]), used=True)
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return persistent_cache(folder or user_cache / "tfopt" / "xla")
    except UnsupportedError as error:
        warn_once("xla_autotune_cache", f"XLA keeps no autotuning results, so each process compiles longer. {error}")
        return None


def _build() -> str:
    return re.sub(r"[^\w.-]", "_", f"tensorflow-{tf.version.VERSION}-{tf.version.GIT_VERSION}")


def _path(folder: str | PathLike[str]) -> Path:
    if not isinstance(folder, str | PathLike) or not isinstance(os.fspath(folder), str):
        raise TypeError(
            f"Expected a folder as a str or Path. Received: {folder!r} of type {type(folder).__name__}. "
            'Pass one that outlives the process, such as "~/.cache/xla".'
        )
    text = os.fspath(folder)
    if not text or "\0" in text:
        raise ValueError(f'Expected the path of a folder. Received: {text!r}. Pass one, such as "~/.cache/xla".')
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(
            f"Expected a folder whose ~ names a user of this machine. Received: {text!r}. Write out the path."
        ) from error


@contextlib.contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    """Removes the folders created in the block if the block raises."""
    new = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # another process uses it by now, or it was never created
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
            f"Expected a writable folder. Found: {error}. Pass another one, or fix its permissions."
        ) from error
