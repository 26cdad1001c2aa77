"""Shards of WebDataset as a source: tar files whose members share a key, each part read by its offset."""

import os
import tarfile
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.paths import file_stamps, for_each_path, opened
from tfopt.pipelines.sources.image_files import decode_image, expect_image_bytes
from tfopt.pipelines.sources.shapes import gathered
from tfopt.pipelines.sources.source import Source, common_length, expect_unchanged, find_paths, held_on_host

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # how gzip, bzip2, xz and zstd begin
Parts = dict[str, tuple[int, int]]  # the first byte of each part, and how many it has, by extension


def tar(paths: Any, *, image: str | None = None) -> Source:
    """Returns the examples in tar files as a source: members whose paths differ only in what follows the first dot.

    Use it for shards of WebDataset, with members such as "0001.jpg" and "0001.cls". The headers of all members are read
    when the source is made, and each part of an example by its offset when it is needed.

    Args:
        paths: A path, a glob or a list of them, also remote ones that TensorFlow can open. What a glob finds is sorted.
        image: The extension of images, such as "jpg", for examples that also have "cls": the class number as text.
            Default: examples are dicts of the bytes of all their parts, by extension in lower case.

    Returns:
        A source of dicts of scalar string tensors, or with `image` of `(image, label)` as `images` returns them, in the
        order of the files and of the members in each. Folders, and members whose names begin with a dot or hold none,
        are skipped.

    Raises:
        TypeError: If a path is neither a string nor a `pathlib.Path`.
        PipelineError: If nothing matches; a file is unreadable, compressed, cut or no tar file; a member is there twice
            or is a link; an example lacks a part; or a label is no integer.

    Example:
        >>> source = tar("shards/train-*.tar", image="jpg")  # doctest: +SKIP
        >>> source.count  # doctest: +SKIP
        1281167
    """
    files = find_paths("tar files", paths)
    stamps = file_stamps(files)
    indexes = for_each_path(_index, files)
    found = [(number, key, parts) for number, index in enumerate(indexes) for key, parts in index.items()]
    common_length({"these tar files": len(found)})
    names = sorted(found[0][2]) if image is None else [image, "cls"]
    for number, key, parts in found:
        if not set(names) <= set(parts) or (image is None and len(parts) > len(names)):
            other = image is not None and image not in parts
            remedy = "Pass the extension that images have as `image`" if other else "Write it again"
            raise PipelineError(
                f"Expected the parts {', '.join(names)} of each example. {key!r} in {files[number]!r} has "
                f"{', '.join(sorted(parts))}. {remedy}, or leave it out."
            )
    ends = np.array([stamp[1] for stamp in stamps], np.int64)
    places = np.array([[(number, *parts[name]) for name in names] for number, _, parts in found], np.int64)
    labels = np.concatenate(list(map(_labels, files, indexes))) if image is not None else np.zeros(0, np.int32)

    def part(number: Any, which: int) -> Any:
        all_files, all_ends, all_places = held_on_host(lambda: tuple(map(tf.constant, (files, ends, places))))
        file, begin, size = tf.unstack(tf.gather(all_places, number)[which])
        path, left = tf.gather(all_files, file), tf.gather(all_ends, file) - begin - size

        # Without Python, so that threads read side by side, and the workers of a tf.data service too.
        def read() -> Any:
            one = tf.data.FixedLengthRecordDataset(path, size, begin, left, buffer_size=size)
            return one.get_single_element()

        return tf.cond(size > 0, read, lambda: "")

    def raw(number: Any) -> Any:
        return {name: part(number, which) for which, name in enumerate(names)}

    def encoded(number: Any) -> Any:
        label = tf.gather(held_on_host(lambda: tf.constant(labels)), number)
        return expect_image_bytes(part(number, 0), tf.strings.format("example {} of the tar files", number)), label

    def decoded(number: Any) -> Any:
        contents, label = encoded(number)
        return decode_image(contents), label

    return gathered(
        f"examples in {len(files):,} tar file{'s' * (len(files) > 1)}",
        len(found),
        raw if image is None else decoded,
        None,
        encoded=None if image is None else encoded,
        fingerprint=lambda: [stamps, file_stamps(files), names],
        check=partial(expect_unchanged, stamps),
        resident=False,
    )


def _index(path: str) -> dict[str, Parts]:
    """Returns the parts of each example in a file, by its key."""
    examples: dict[str, Parts] = {}
    try:
        with opened(path) as file:
            if file.read(6).startswith(_COMPRESSED):
                raise PipelineError(f"Expected tar files that are not compressed. {path!r} is. Decompress it once.")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]
                    _add(examples, member, path)
                file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # which tarfile takes for an end, too
                raise tarfile.ReadError("cut or damaged inside")
    except (OSError, tarfile.TarError, tf.errors.OpError) as error:
        raise PipelineError(
            f"Expected a whole tar file at {path!r}. It cannot be read: {error}. Write or copy it again."
        ) from error
    return examples


def _add(examples: dict[str, Parts], member: tarfile.TarInfo, path: str) -> None:
    folder, name = os.path.split(member.name)
    stem, _, extension = name.partition(".")
    if member.isdir() or not stem or not extension:
        return
    parts = examples.setdefault(os.path.join(folder, stem), {})
    if not member.isreg() or member.issparse() or extension.lower() in parts:
        what = "there twice" if extension.lower() in parts else "a link, or no plain file"
        raise PipelineError(
            f"Expected each member of {path!r} once, as a file. {member.name!r} is {what}. Write or copy it again."
        )
    parts[extension.lower()] = (member.offset_data, member.size)


def _labels(path: str, index: dict[str, Parts]) -> Any:
    """Returns the class number of each example in a file: int32 (examples)."""
    texts = []
    with opened(path) as file:
        for begin, size in (parts["cls"] for parts in index.values()):
            file.seek(begin)
            texts.append(file.read(size))
    try:
        return np.array([int(text) for text in texts], np.int32)
    except (ValueError, OverflowError) as error:
        raise PipelineError(
            f"Expected class numbers in the parts 'cls' of {path!r}. Found: {error}. Correct them, or leave out "
            "`image`, and make labels of the bytes in `transform`."
        ) from error
