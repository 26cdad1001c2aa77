"""The index beside the shards: what they hold, how many records, how many bytes, and their SHA-256."""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from typing import Any, Self

from tfopt.errors import PipelineError
from tfopt.files import write_atomic

INDEX_NAME = "index.json"
_VERSION = 1
_FORMAT = "tfopt.records"
# One altered byte cannot hit both: an index of ours is never taken for another program's.
_MARKS = (f'"{_FORMAT}"'.encode(), b'"checksum"')
_SHARD_NAME = re.compile(r"records-\d{5,}\.tfrecord(\.gz|\.zz)?")
_END_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of records.

    Args:
        name: The file's name in the folder.
        count: How many records it holds.
        size_bytes: Its length.
        sha256: The SHA-256 of its contents, in hexadecimal digits.
        ends_sha256: That of its first and last 64 KiB, which is checked before each training.
    """

    name: str
    count: int
    size_bytes: int
    sha256: str
    ends_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What `write_records` wrote.

    Args:
        shards: The files, in the order of the examples.
        spec: The structure of an example with the dtype and shape of each tensor, as JSON values.
        compression: "GZIP", "ZLIB", or "" for none.
        image: Whether the first tensor of an example is an encoded image.
        class_names: What the numbers of the labels stand for. None: unknown.
    """

    shards: tuple[Shard, ...]
    spec: Any
    compression: str = ""
    image: bool = False
    class_names: tuple[str, ...] | None = None

    @property
    def count(self) -> int:
        """The number of examples."""
        return sum(shard.count for shard in self.shards)

    def to_dict(self) -> dict[str, Any]:
        """Returns the index as JSON values."""
        names = None if self.class_names is None else list(self.class_names)
        return asdict(self) | {"shards": [asdict(shard) for shard in self.shards], "class_names": names}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns the index of JSON values."""
        names = values["class_names"]
        shards = tuple(Shard(**shard) for shard in values["shards"])
        return cls(**values | {"shards": shards, "class_names": None if names is None else tuple(names)})


def write_index(folder: str, index: Index) -> None:
    """Writes the index of a folder."""
    write_atomic(os.path.join(folder, INDEX_NAME), _text(index.to_dict()))


def ends_sha256(path: str) -> str:
    """Returns the SHA-256 of a file's first and last 64 KiB, in hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(max(0, os.path.getsize(path) - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def has_index(folder: str) -> bool:
    """Whether a folder holds an index of tfopt's, damaged or not."""
    path = os.path.join(folder, INDEX_NAME)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            contents = file.read()
        if any(mark in contents for mark in _MARKS):
            return True
        json.loads(contents)
    except (OSError, ValueError):
        # Emptied, overwritten or forbidden: only the names beside it can tell whose it is.
        return any(map(_SHARD_NAME.fullmatch, os.listdir(folder)))
    return False


def read_index(folder: str) -> Index:
    """Reads the index of a folder.

    Raises:
        PipelineError: It is damaged, or of a newer version.
    """
    path = os.path.join(folder, INDEX_NAME)
    try:
        with open(path, "rb") as file:
            contents = file.read()
        values = json.loads(contents)
        version = values.pop("version")
        del values["format"], values["checksum"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    if version != _VERSION and isinstance(version, int) and contents == _text(values, version).encode():
        raise PipelineError(
            f"Expected an index of version {_VERSION} in {path!r}. Found version {version}. Update tfopt."
        )
    # Compared as bytes, so that not one of them can differ.
    if contents != _text(values).encode():
        raise _damaged(path, "its contents do not fit its checksum")
    return Index.from_dict(values)


def _text(values: dict[str, Any], version: int = _VERSION) -> str:
    stated = {"format": _FORMAT, "version": version} | values
    checksum = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
    return json.dumps(stated | {"checksum": checksum}, indent=1, ensure_ascii=False) + "\n"


def _damaged(path: str, what: str) -> PipelineError:
    return PipelineError(
        f"Expected the index that write_records wrote. {path!r} is damaged or was edited: {what}. Copy the folder or "
        "write the records again."
    )
