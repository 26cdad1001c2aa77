"""Manifests: JSON files that say what each checkpoint holds, and carry their own checksum."""

import datetime
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfopt.checkpoint.folder.blobs import Place, Size
from tfopt.checkpoint.folder.contents import DTYPES, Content
from tfopt.errors import CheckpointError
from tfopt.files import sync, write_atomic

FORMAT = 1
_NAME = re.compile(r"(\d{8,})-step-(\d+)\.json")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]{{8}}")
_HASH = re.compile("[0-9a-f]{64}")


class DamagedError(ValueError):
    """The file is not a manifest, or not the one written under this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and where."""

    number: int  # of the checkpoint in its folder; a later one has a higher number
    step: int
    time: datetime.datetime
    best: tuple[str, str] | None  # the metric by which the best checkpoint is kept, and "min" or "max"
    metadata: dict[str, Any]
    blobs: dict[str, Size]
    arrays: dict[str, Place]

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.number:08}-step-{self.step}.json"

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, whether or not other checkpoints share them."""
        return sum(place.content.size_bytes for place in self.arrays.values())

    def by_blob(self) -> dict[str, dict[str, Place]]:
        """Returns the arrays that are in each blob."""
        found: dict[str, dict[str, Place]] = {blob: {} for blob in self.blobs}
        for name, place in self.arrays.items():
            found[place.blob][name] = place
        return found


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest's file in a folder: with the manifest, or the reason why there is none."""

    path: Path
    number: int
    step: int
    manifest: Manifest | None
    error: DamagedError | CheckpointError | OSError | None


def as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata as it will be read back; raises TypeError for what JSON cannot hold."""
    try:
        _expect_text_keys(metadata)
        return dict(json.loads(json.dumps(dict(metadata))))
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: it contains itself
        raise TypeError(
            f"Expected JSON values as metadata. Found: {error}. Convert NumPy numbers with float() or int(), and keys "
            "with str()."
        ) from error


def find_manifests(folder: Path) -> list[Found]:
    """Reads the manifests in a folder, the newest first; none if there is no folder. Raises OSError."""
    try:
        names = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    except FileNotFoundError:
        return []
    found = []
    for name in sorted(names, key=lambda name: -int(name[1])):
        manifest = error = None
        path = folder / name[0]
        try:
            manifest = _parsed(path.read_bytes(), path)
        except FileNotFoundError:  # removed just now, as an old one
            continue
        except (DamagedError, CheckpointError, OSError) as caught:
            error = caught
        found.append(Found(path, int(name[1]), int(name[2]), manifest, error))
    return found


def leftovers_in(folder: Path) -> list[Path]:
    """Returns the parts of manifests that killed writers left."""
    return [folder / name for name in os.listdir(folder) if _LEFTOVER.fullmatch(name)]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest and proves it by reading it back; what it refers to must be on the disk.

    Raises CheckpointError if what was read differs, OSError if it cannot be written or read.
    """
    path = folder / manifest.file_name
    text = _text(manifest)
    write_atomic(path, text)
    sync(folder)
    if path.read_bytes() != text.encode():
        path.unlink()
        raise CheckpointError(f"Expected to read back {os.fspath(path)!r} as written. It differs: replace the disk.")


def _text(manifest: Manifest) -> str:
    body: dict[str, Any] = {
        "format": FORMAT,
        "number": manifest.number,
        "step": manifest.step,
        "time": manifest.time.isoformat(),
        "best": manifest.best and list(manifest.best),
        "metadata": manifest.metadata,
        "blobs": {name: asdict(size) for name, size in manifest.blobs.items()},
        "arrays": {
            name: asdict(place.content) | {"blob": place.blob, "offset": place.offset}
            for name, place in manifest.arrays.items()
        },
    }
    lines = [f'"sha256": "{_checksum(body)}"']
    for key, value in body.items():
        if key in ("blobs", "arrays") and value:  # one a line, for people
            rows = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            lines.append(f'"{key}": {{\n  {rows}\n }}')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _checksum(body: dict[str, Any]) -> str:
    """The SHA-256 of what a manifest says, however its file is laid out. It must stay the same in every format."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _parsed(text: bytes, path: Path) -> Manifest:
    """Raises DamagedError, or CheckpointError for a format that this version does not know."""
    try:
        body = json.loads(text)
        if body.pop("sha256") != _checksum(body):
            raise DamagedError("its checksum does not match")
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"Expected {os.fspath(path)!r} to have format {FORMAT}. Found format {body['format']!r}, of another "
                "version of tfopt. Use that version."
            )
        manifest = _manifest(body)
    except DamagedError:
        raise
    # RecursionError: of brackets in brackets. AttributeError: it is no JSON object.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"it is not a manifest: {type(error).__name__}: {error}") from error
    if path.name != manifest.file_name:
        raise DamagedError(f"it is the manifest of checkpoint {manifest.number}, step {manifest.step}")
    return manifest


def _manifest(body: dict[str, Any]) -> Manifest:
    """Raises ValueError, LookupError, TypeError or AttributeError if it is not a manifest."""
    manifest = Manifest(
        number=_count(body["number"]),
        step=_count(body["step"]),
        time=datetime.datetime.fromisoformat(body["time"]),
        best=None if body["best"] is None else (str(body["best"][0]), str(body["best"][1])),
        metadata=dict(body["metadata"]),
        blobs={_hash(name): _size(size) for name, size in body["blobs"].items()},
        arrays={name: _place(array) for name, array in body["arrays"].items()},
    )
    for name, place in manifest.arrays.items():
        size = manifest.blobs[place.blob]
        if not size.file_bytes - size.data_bytes <= place.offset <= size.file_bytes - place.content.size_bytes:
            raise ValueError(f"the array {name!r} is outside its blob")
    return manifest


def _size(blob: dict[str, Any]) -> Size:
    size = Size(_count(blob["file_bytes"]), _count(blob["data_bytes"]))
    if size.data_bytes > size.file_bytes:
        raise ValueError("a blob is smaller than what it holds")
    return size


def _place(array: dict[str, Any]) -> Place:
    if array["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {array['dtype']!r}")
    content = Content(array["dtype"], tuple(map(_count, array["shape"])), _hash(array["sha256"]))
    return Place(content, _hash(array["blob"]), _count(array["offset"]))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:  # a bool is an int
        raise ValueError(f"expected a non-negative integer, found {value!r}")
    return value


def _hash(value: str) -> str:
    if not _HASH.fullmatch(value):  # it becomes a file's name
        raise ValueError(f"expected a hash, found {value!r}")
    return value


def _expect_text_keys(value: Any) -> None:
    """Raises TypeError for keys that JSON would silently turn into text."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r}")
            _expect_text_keys(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _expect_text_keys(each)
