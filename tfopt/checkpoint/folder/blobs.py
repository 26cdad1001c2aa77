"""Blobs: files of arrays, written whole and checked byte by byte.

A blob is a safetensors file (https://github.com/huggingface/safetensors#format), so that other tools can read it. Its
header holds the SHA-256 of each array, and the blob is named by the SHA-256 of its header: the name vouches for all of
it, and each byte is hashed once.

The package safetensors is not used: its writer neither hashes nor syncs nor reports how far it came, and its NumPy
reader copies and does not know float8. The format is a length, JSON and the arrays.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfopt.checkpoint.folder.contents import DTYPES, Content, bytes_of
from tfopt.errors import CheckpointError
from tfopt.pipelines.shared.problems import Problem

BLOB_BYTES = 16 * 2**20
"""Arrays share a blob up to this size, since each blob costs a sync; a larger array has its own."""

ALIGNMENT = 64
"""Bytes, at a multiple of which a blob's arrays begin; TensorFlow takes only such memory over without a copy."""
FOLDER = "blobs"
_CHUNK_BYTES = 4 * 2**20
_LENGTH = struct.Struct("<Q")
_FILE = re.compile(r"[0-9a-f]{64}\.safetensors|\.[0-9a-f]{64}\.safetensors\.[0-9a-f]{8}")
# Other dtypes are stored as bytes, U8, and the manifest says what they are.
_CODES = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind in ("float", "int", "uint")
    for bits in (8, 16, 32, 64)
    if (kind, bits) != ("float", 8)
}


@dataclass(frozen=True, slots=True)
class Place:
    """An array in a blob."""

    content: Content
    blob: str
    offset: int  # in the file


@dataclass(frozen=True, slots=True)
class Size:
    """How large a blob is."""

    file_bytes: int
    data_bytes: int  # without the header


@dataclass(frozen=True, slots=True)
class Layout:
    """A blob to be written."""

    name: str
    header: bytes
    places: dict[str, Place]

    @property
    def size(self) -> Size:
        """How large it will be."""
        data_bytes = sum(place.content.size_bytes for place in self.places.values())
        return Size(len(self.header) + data_bytes, data_bytes)


def path_of(folder: Path, blob: str) -> Path:
    """Returns the file of a blob."""
    return folder / FOLDER / f"{blob}.safetensors"


def lay_out(contents: Mapping[str, Content]) -> Layout:
    """Decides where in a blob each array goes."""
    # The format allows no gaps; with the widest first, each array is aligned to its own width.
    names = sorted(contents, key=lambda name: -DTYPES[contents[name].dtype].itemsize)
    described: dict[str, Any] = {"__metadata__": {name: f"sha256 {contents[name].sha256}" for name in names}}
    starts, end = {}, 0
    for name in names:
        content, starts[name] = contents[name], end
        end += content.size_bytes
        code = _CODES.get(content.dtype)
        described[name] = {
            "dtype": code or "U8",
            "shape": list(content.shape) if code else [content.size_bytes],
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    blob = hashlib.sha256(header).hexdigest()
    return Layout(blob, header, {name: Place(contents[name], blob, len(header) + starts[name]) for name in names})


def write_blob(folder: Path, layout: Layout, arrays: Mapping[str, Any]) -> None:
    """Writes a blob, proves it by reading it back, and gives it its name. The folder of blobs is not synced.

    Raises CheckpointError if what was read differs, OSError if it cannot be written or read.
    """
    path = path_of(folder, layout.name)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            _write(handle, memoryview(layout.header))
            for name in layout.places:
                _write(handle, bytes_of(arrays[name]))
            os.fsync(handle)
            if hasattr(os, "posix_fadvise"):  # so that what is read back comes from the disk
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        problems = problems_of(temporary, layout.name, layout.size, layout.places)
        if problems:
            raise CheckpointError(
                f"Expected to read back what was written. Found {problems[0]}. The disk is at fault, or an array was "
                "changed while it was being saved. Copy arrays before saving them."
            )
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def problems_of(path: Path, blob: str, size: Size, places: Mapping[str, Place]) -> list[Problem]:
    """Reads a blob's header and the arrays in these places; returns what is wrong with them.

    Raises OSError if it cannot be read for a reason other than damage, such as missing permission.
    """
    try:
        # Read, not mapped: in a mapped file that is cut meanwhile, the process would end with SIGBUS.
        with open(path, "rb", buffering=0) as file:
            return _problems(path, file, blob, size, places)
    except FileNotFoundError:
        return [Problem(str(path), "missing", "it is not there")]
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return [Problem(str(path), "unreadable", str(error))]


def _problems(path: Path, file: Any, blob: str, size: Size, places: Mapping[str, Place]) -> list[Problem]:
    found = os.fstat(file.fileno()).st_size
    if found != size.file_bytes:
        what = f"it has {found:,} bytes instead of {size.file_bytes:,}"
        return [Problem(str(path), "cut" if found < size.file_bytes else "longer", what)]
    problems = []
    if _sha256(file, 0, size.file_bytes - size.data_bytes) != blob:
        problems.append(Problem(str(path), "altered", "its header does not match its name"))
    by_offset = sorted(places.items(), key=lambda item: item[1].offset)
    altered = [
        name
        for name, place in by_offset
        if _sha256(file, place.offset, place.content.size_bytes) != place.content.sha256
    ]
    problems += [Problem(str(path), "altered", f"the array {name!r} does not match its checksum") for name in altered]
    return problems


def _write(handle: int, data: memoryview) -> None:
    written = 0
    while written < len(data):  # of a full disk, the first call writes what fits, and the second one raises
        written += os.write(handle, data[written : written + _CHUNK_BYTES])


def _sha256(file: Any, offset: int, size_bytes: int) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(size_bytes, _CHUNK_BYTES)))
    file.seek(offset)
    while size_bytes > 0 and (count := file.readinto(buffer[:size_bytes])):  # 0: cut meanwhile
        digest.update(buffer[:count])
        size_bytes -= count
    return digest.hexdigest()


def blobs_in(folder: Path) -> list[Path]:
    """Returns the files of blobs, and what killed writers left of some."""
    return [folder / FOLDER / name for name in os.listdir(folder / FOLDER) if _FILE.fullmatch(name)]


def map_array(folder: Path, place: Place) -> np.ndarray:
    """Returns an array of a blob as a private, read-only mapping of the file; one below 1 MiB is copied.

    Raises OSError if the file cannot be read, ValueError if it is cut.
    """
    content, path = place.content, path_of(folder, place.blob)
    dtype = DTYPES[content.dtype]
    if content.size_bytes < 2**20:  # each mapping holds a file open, of which a process may have about 1000
        with open(path, "rb") as file:
            file.seek(place.offset)
            data = np.frombuffer(file.read(content.size_bytes), np.uint8)
            return data.view(dtype).reshape(content.shape)
    mapped = np.memmap(path, dtype, "c", place.offset, content.shape).view(np.ndarray)  # "c": private
    mapped.flags.writeable = False
    return mapped
