"""The library of the installed TensorFlow that holds its log settings and XLA's flags."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from tfopt.errors import UnsupportedError


def framework_library() -> Path:
    """Its path.

    Raises:
        tfopt.errors.UnsupportedError: There is none.
    """
    found = sorted(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*"))
    if not found:
        raise UnsupportedError(
            f"Expected libtensorflow_framework in {tf.sysconfig.get_lib()}. Found: none. Use TensorFlow for Linux."
        )
    return found[0]


@contextmanager
def mapped(library: Path) -> Iterator[mmap.mmap]:
    """The library's bytes, to be searched."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content
