"""How a TFRecord file is laid out, and what can be told from the headers of its records alone.

A record is: its length (8 bytes, little-endian), a checksum of those 8 bytes (4), the data, a checksum of it (4).
Source: tensorflow/core/lib/io/record_writer.h.
"""

import os
import struct
from typing import Any

import numpy as np

from tfopt.errors import PipelineError

HEADER = struct.Struct("<QI")
FOOTER_BYTES = 4


def compression_of(head: bytes) -> str:
    """Returns the compression of a file, "GZIP" or "" for none, from its first bytes."""
    # A plain file may begin with the bytes of gzip, as a length; its checksum settles it.
    return "GZIP" if head.startswith(b"\x1f\x8b\x08") and not is_header(head) else ""


def is_header(head: bytes) -> bool:
    """Whether bytes are the header of a record."""
    return len(head) == HEADER.size and bool(header_offsets(head).size)


def header_offsets(data: bytes) -> Any:
    """Returns where headers may begin in a piece of a file: everywhere that 12 bytes are a length and its checksum."""
    if len(data) < HEADER.size:
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), HEADER.size)
    stored = windows[:, 8:].astype("<u4") @ np.array([1, 1 << 8, 1 << 16, 1 << 24], "<u4")
    return np.flatnonzero(_masked_crc32c(windows[:, :8]) == stored)


def count_records(path: str) -> int:
    """Counts the records of a plain file; reads their headers only.

    Raises:
        PipelineError: The file ends inside a record.
    """
    size, position, count = os.path.getsize(path), 0, 0
    with open(path, "rb") as file:
        while position < size:
            file.seek(position)
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                raise _cut(path, count, position)
            position += HEADER.size + HEADER.unpack(header)[0] + FOOTER_BYTES
            if position > size:
                raise _cut(path, count, size)
            count += 1
    return count


def _cut(path: str, count: int, end: int) -> PipelineError:
    return PipelineError(
        f"Expected whole records. The TFRecord file {path!r} is cut inside record {count} (counted from 0; the file "
        f"ends at byte {end}), or its length there is altered. Write or copy it again; verify_records says more."
    )


def _masked_crc32c(rows: Any) -> Any:
    """Returns the checksum of each row of bytes as TFRecord stores it."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)


def _table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


_TABLE = _table()
