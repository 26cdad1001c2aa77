"""Fits documents into rows of one length."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Which piece of which document lies in which row. All arrays are int64."""

    rows: Any
    """The number of the first piece of each row, and at last the number of pieces: (rows + 1)."""
    documents: Any
    """The document of each piece: (pieces)."""
    offsets: Any
    """Where in its document a piece begins: (pieces)."""
    lengths: Any
    """Tokens in each piece: (pieces)."""


def pack(lengths: Any, size: int) -> Packing:
    """Packs documents into rows of `size` tokens, each token once, with as few rows as best fit decreasing needs.

    A document that is longer is cut into pieces; all but the last fill a row each. The other pieces, the longest first,
    go to the row where they leave the least room. In a row, and by their first pieces from row to row, documents keep
    their order. Empty documents take part in no row.

    Args:
        lengths: Tokens in each document: integers (documents).
        size: Tokens in a row.
    """
    lengths = np.asarray(lengths, np.int64)
    whole, rest = np.divmod(lengths, size)
    full = np.repeat(np.arange(len(lengths)), whole)
    first_full = np.repeat(np.cumsum(whole) - whole, whole)
    last = np.flatnonzero(rest)
    documents = np.concatenate([full, last])
    offsets = np.concatenate([(np.arange(len(full)) - first_full) * size, whole[last] * size])
    pieces = np.concatenate([np.full(len(full), size), rest[last]])
    row = np.concatenate([np.arange(len(full)), len(full) + _best_fit(rest[last], size)])
    order = np.lexsort((offsets, documents))
    _, first = np.unique(row[order], return_index=True)
    place = np.argsort(np.argsort(first))[row]  # rows by their first pieces
    order = order[np.argsort(place[order], kind="stable")]
    rows = np.searchsorted(place[order], np.arange(len(first) + 1))
    return Packing(rows, documents[order], offsets[order], pieces[order])


def _best_fit(lengths: Any, size: int) -> Any:
    """The row of each piece, from 0."""
    row = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(size + 1)]  # by the room that is left
    rooms = 0  # the bit of each room that some row has left
    count = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = size, count
            count += 1
        row[piece] = chosen
        if room > length:
            open_rows[room - length].append(chosen)
            rooms |= 1 << (room - length)
    return row
