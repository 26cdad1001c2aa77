"""Files as a source: paths and labels, which are shuffled and divided in place of the contents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.paths import absolute, expect_reachable, expect_utf8, file_stamps
from tfopt.pipelines.shared.problems import Problem, listed
from tfopt.pipelines.shared.seeding import in_batches
from tfopt.pipelines.sources.source import Source, held_on_host
from tfopt.warn import warn_caller

_GATHERED = 1024  # paths at once: a call for each would cost more than the path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a raw element, `(path, value)`, becomes an example; the fields are those of `Source`."""

    decode: Callable[..., Any]
    encoded: Any = None
    only_jpeg: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """How files of a kind are checked and read."""

    look: Callable[..., Sequence[Any]]
    """Given paths and values, and whether to decode files whole, returns what was found of each, with its `problem`."""
    reading: Callable[[Sequence[Any]], Reading]
    """Given what was found of all files, or nothing before they are looked at, returns how they are read."""
    refusal: Callable[[Sequence[Problem]], PipelineError]
    """Returns the error that names the files with a problem."""
    fault: str
    """What is wrong with such a file, such as "do not decode"."""
    values_are_files: bool = False
    """Whether the values are paths of further files of the example, such as masks."""
    are_images: bool = False
    """Whether `verify_images` takes them."""


def file_source(
    kind: FileKind,
    name: str,
    paths: Sequence[str],
    values: Any,
    class_names: tuple[str, ...] | None = None,
    note: str = "",
) -> Source:
    """Returns these files as a source whose raw elements are `(path, value)`."""
    files = np.array([absolute(expect_utf8(expect_reachable(path))) for path in paths], dtype=object)

    def keys(numbers: Any) -> Any:
        with tf.device("CPU:0"):
            return tf.constant(files[numbers]), tf.constant(values[numbers])

    def spread(numbers: Any, limit: int) -> Any:
        return numbers[np.unique(np.linspace(0, len(numbers) - 1, num=min(limit, len(numbers))).astype(int))]

    def more_stamps(numbers: Any) -> Any:
        return file_stamps(values[numbers]) if kind.values_are_files else None

    def images_of(numbers: Any) -> Any:
        if not kind.are_images:
            return None
        return tuple(zip(files[numbers], values[numbers], strict=True) if kind.values_are_files else files[numbers])

    def numbered(numbers: Any, reading: Reading) -> Source:
        all_keys = cache(partial(keys, numbers))  # once, though several datasets are made of them

        def checked(on_bad_file: str) -> Source:
            found = kind.look(files[numbers].tolist(), values[numbers], decoding=on_bad_file == "skip")
            problems = [each.problem for each in found if each.problem is not None]
            if problems and on_bad_file == "raise":
                raise kind.refusal(problems)
            reading = kind.reading([each for each in found if each.problem is None])
            without = _without(problems, len(found), name, kind.fault) if problems else ""
            reading = replace(reading, note="; ".join(filter(None, [note, without, reading.note])))
            return numbered(numbers[[each.problem is None for each in found]], reading)

        return Source(
            name=name,
            dataset=lambda: tf.data.Dataset.from_tensor_slices(all_keys()),
            count=len(numbers),
            decode=reading.decode,
            origin=_path_of,
            sample=lambda limit: tf.data.Dataset.from_tensor_slices(keys(spread(numbers, limit))),
            at=partial(_keys_at, all_keys),
            encoded=reading.encoded,
            only_jpeg=reading.only_jpeg,
            fingerprint=lambda: [class_names, values[numbers], file_stamps(files[numbers]), more_stamps(numbers)],
            class_names=class_names,
            part=lambda index, parts: numbered(numbers[index::parts], reading),
            note=reading.note,
            files=images_of(numbers),
            checked=checked,
        )

    return numbered(np.arange(len(files)), replace(kind.reading([]), note=note))


def _keys_at(all_keys: Callable[[], Any], positions: Any) -> Any:
    """Returns the paths and values at these positions, as `Source.at` does."""

    @without_autograph
    def gathered(some: Any) -> Any:
        paths, values = held_on_host(all_keys)
        return tf.data.Dataset.from_tensor_slices((tf.gather(paths, some), tf.gather(values, some)))

    return in_batches(positions, _GATHERED, full=False).flat_map(gathered)


def _without(problems: list[Problem], files: int, name: str, fault: str) -> str:
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
