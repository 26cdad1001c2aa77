"""Files as a source: paths and labels, which are shuffled and divided in place of the contents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.by_file.labels import Labelled
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import file_stamps, local_path
from tfopt.pipelines.shared.problems import Problem, listed
from tfopt.pipelines.shared.seeding import in_batches
from tfopt.pipelines.sources.source import Source, held_on_host
from tfopt.warn import warn_caller

_GATHERED = 1024  # paths at once: a call for each would cost more than the path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """How files of a kind are checked and read."""

    look: Callable[..., Sequence[tuple[Problem | None, Any]]]
    """Given paths and values, and whether to decode files whole, returns the problem of each and what else is known."""
    reading: Callable[[Sequence[Any]], dict[str, Any]]
    """Given what was found of all good files, or nothing before they are looked at, returns the fields of `Source` that
    make examples of raw elements, `(path, value)`."""
    refusal: str
    """The error where files have a problem: a format with `count` and `listed`."""
    fault: str
    """What is wrong with such a file, such as "do not decode"."""
    values_are_files: bool = False
    """Whether the values are paths of further files of the example, such as masks."""
    are_images: bool = False
    """Whether `verify_images` takes them."""


def file_source(kind: FileKind, name: str, given: Labelled) -> Source:
    """Returns these files as a source whose raw elements are `(path, value)`."""

    def source_of(files: Any, values: Any, reading: dict[str, Any]) -> Source:
        @cache  # once, though several datasets are made of them
        def keys() -> Any:
            return _tensors(files, values)

        def sample(limit: int) -> Any:
            some = np.unique(np.linspace(0, len(files) - 1, num=min(limit, len(files))).astype(int))
            return tf.data.Dataset.from_tensor_slices(_tensors(files[some], values[some]))

        def fingerprint() -> list[Any]:
            more = file_stamps(values) if kind.values_are_files else None
            return [given.class_names, values, file_stamps(files), more]

        def checked(on_bad_file: str) -> Source:
            looked = kind.look(files.tolist(), values, decoding=on_bad_file == "skip")
            good = np.array([problem is None for problem, _ in looked])
            problems = [problem for problem, _ in looked if problem is not None]
            if problems and on_bad_file == "raise":
                raise PipelineError(kind.refusal.format(count=f"{len(problems):,}", listed=listed(problems)))
            left_out = _warned(problems, len(files), name, kind.fault) if problems else ""
            reading = kind.reading([found for problem, found in looked if problem is None])
            notes = given.note, left_out, reading.get("note")
            return source_of(files[good], values[good], reading | {"note": "; ".join(filter(None, notes))})

        of_each = tuple(zip(files, values, strict=True)) if kind.values_are_files else tuple(files)
        return Source(
            name=name,
            dataset=lambda: tf.data.Dataset.from_tensor_slices(keys()),
            count=len(files),
            origin=_path_of,
            sample=sample,
            at=partial(_keys_at, keys),
            fingerprint=fingerprint,
            class_names=given.class_names,
            part=lambda index, parts: source_of(files[index::parts], values[index::parts], reading),
            files=of_each if kind.are_images else None,
            checked=checked,
            **reading,
        )

    files = np.array([local_path(path) for path in given.paths], object)
    return source_of(files, given.values, kind.reading([]) | {"note": given.note})


def _tensors(files: Any, values: Any) -> Any:
    with tf.device("CPU:0"):
        return tf.constant(files), tf.constant(values)


def _keys_at(keys: Callable[[], Any], positions: Any) -> Any:
    """Returns the paths and values at these positions, as `Source.at` does."""

    @without_autograph
    def gathered(some: Any) -> Any:
        paths, values = held_on_host(keys)
        return tf.data.Dataset.from_tensor_slices((tf.gather(paths, some), tf.gather(values, some)))

    return in_batches(positions, _GATHERED, full=False).flat_map(gathered)


def _warned(problems: list[Problem], files: int, name: str, fault: str) -> str:
    """Warns of files that are left out; returns what the plan says of them."""
    if len(problems) == files:
        raise PipelineError(
            f"Expected at least one good file in {name}. Found none:\n{listed(problems)}\nCheck the paths."
        )
    found = f"{len(problems):,} of {files:,} files that {fault}"
    warn_caller(f"on_bad_file='skip' leaves out {found}:\n{listed(problems)}")
    return f"without {found}"


def _path_of(path: Any, value: Any) -> Any:
    del value
    return path
