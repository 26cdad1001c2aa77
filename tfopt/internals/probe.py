"""What a probe is, and what its answer depends on."""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tfopt.internals.sources import find, fingerprint

NEEDED, NEEDLESS, UNFIT = "needed", "needless", "unfit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How to see whether a patch is needed and works."""

    home: str
    """Where the patch is, "module:NAME"."""
    harmless: str
    """The function, "module:function", that trains where the defect does not show: numbers that a patch must keep."""
    measure: str = ""
    """The function that shows the defect. Empty for none: a patch that keeps the numbers of `harmless` is needed."""
    right: Any = None
    """What `measure` returns without the defect: a number or a string, or several for the parts of a defect."""
    refuses: bool = False
    """Whether the patch refuses each training that shows the defect, rather than mend it."""
    tolerance: float = 0.0
    """By how much numbers may differ from the right ones. Those of `harmless` stay, on replicas up to rounding."""
    devices: int = 1
    """Logical devices to train on."""
    workers: int = 1
    """Processes that train together. They share the current folder, and compute the same."""
    throughout: str = ""
    """Home of another patch that is in place all the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a probe."""

    state: str
    """NEEDED, NEEDLESS (mended upstream) or UNFIT."""
    why: str
    """What was measured."""
    lasts: bool = True
    """Whether it holds in other processes, too. If not, it is not kept on disk."""


class Probed(Protocol):
    """A patch with a probe."""

    name: str
    probe: Probe

    @property
    def targets(self) -> Iterable[str]:
        """The functions that it replaces or relies on, for `sources.find`."""
        ...

    def tried(self) -> AbstractContextManager[None]:
        """Patches in a block, whatever the version."""
        ...


def key_of(patch: Probed) -> str:
    """What a verdict depends on."""
    found = [_fingerprint(target) for target in patch.targets]
    return _hash(json.dumps([sys.version, versions(), found, _code(), repr(patch.probe)]))


@cache
def _code() -> str:
    """A hash of all of tfopt, of which a patch or a probe may use any part."""
    return _hash("".join(file.read_text(encoding="utf-8") for file in _files()))


def _files() -> Iterator[Path]:
    for package in ("tfopt", "tfopt.callbacks", "tfopt.pipelines"):
        folder = Path(importlib.import_module(package).__path__[0])
        yield from sorted(folder.rglob("*.py"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def versions() -> tuple[str, str, str]:
    """Of TensorFlow, Keras and NumPy."""
    # Not those of the installed packages, which have many names: tensorflow-cpu, tf-nightly, keras-nightly.
    import keras
    import numpy as np
    import tensorflow as tf

    return tf.__version__, keras.__version__, np.__version__


def _fingerprint(target: str) -> str:
    try:
        return fingerprint(getattr(*find(target)))
    except (ImportError, AttributeError, OSError, TypeError, SyntaxError) as error:
        return type(error).__name__
