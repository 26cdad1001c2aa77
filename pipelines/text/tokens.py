"""Documents of token ids as a source, each by itself or packed into rows."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.errors import PipelineError
from tfopt.pipelines.shared.elements import dense
from tfopt.pipelines.shared.nondeterminism import CHANGING, find_in_dataset
from tfopt.pipelines.sources.npy import npy
from tfopt.pipelines.sources.rows import arrays
from tfopt.pipelines.sources.shapes import gathered
from tfopt.pipelines.sources.source import Source, held_on_host
from tfopt.pipelines.text.packing import pack

_AT_ONCE = 2**24  # tokens of a file that are searched at once
_TEXTS_AT_ONCE = 1000
_LARGEST = 2**31 - 1  # of int32


def tokens(documents: Any, *, end: int | None = None, tokenize: Callable[[list[str]], Any] | None = None) -> Source:
    """Returns documents of token ids as a source, for language models.

    With `pack=LENGTH` a pipeline packs them into rows of one length: see `plan_pipeline`. Without it, an example is one
    document, int32 (tokens of it); `next_tokens` makes inputs, labels and weights of it.

    Args:
        documents: A list of documents, each a list or array of ids; a `tf.RaggedTensor` (documents, None); the ids of
            all documents one after the other, as an array or the path of a .npy file, which is mapped rather than read;
            or a `Source` or `tf.data.Dataset` of documents, which is read at once, into memory.
        end: For documents that follow one another: the id that ends each, and belongs to it. The last one may lack it.
        tokenize: For documents of text, such as `lines(paths)` or a list of strings: a function of a list of strings
            that returns a list of ids for each, or a `tf.RaggedTensor`. It gets up to 1,000 per call. All documents are
            tokenized here, and the ids stay in memory.

    Raises:
        TypeError: If ids are not integers, or `documents` is something else.
        ValueError: If a document has more than one axis, `end` is missing or not asked for, or an id does not fit
            int32.
        PipelineError: If there is no token, a dataset never ends, the file is missing, cut or not one of integers, or
            `tokenize` returns another number of documents than it was given.

    Example:
        >>> from tfopt.pipelines import build_pipeline, tokens
        >>> documents = tokens([[5, 6, 7], [8, 9], [4]])
        >>> (inputs, labels, weights), = build_pipeline(documents, pack=8, batch_size=1, training=False)
        >>> inputs["tokens"].numpy().tolist(), inputs["segments"].numpy().tolist()
        ([[5, 6, 7, 8, 9, 4, 0, 0]], [[1, 1, 1, 2, 2, 3, 0, 0]])
    """
    changes = ""
    if isinstance(documents, Source | tf.data.Dataset):
        documents, changes = _read(documents)
    if tokenize is not None:
        found = _tokenized(documents, tokenize)
    elif isinstance(documents, str | os.PathLike | np.ndarray):
        found = _one_after_the_other(documents, end)
    elif end is not None:
        raise ValueError(
            "Expected ids one after the other for `end`: an array, or the path of a .npy file. Received: documents "
            "that are apart. Leave `end` out."
        )
    else:
        found = _apart(documents)
    return _by_document(replace(found, changes=changes))


def next_tokens(document: Any) -> tuple[dict[str, Any], Any, Any]:
    """Returns what a language model trains on of one document, in a graph; a `transform` for `tokens`.

    With `pad="batch"` or `bucket=True` it makes the same of documents as `pack` does, one document a row.

    Args:
        document: Ids, int32 (tokens).

    Returns:
        ({"tokens", "segments", "positions"}, labels, weights), (tokens,) each: segments are 1, positions count from 0,
        labels are the next tokens. The last token has none: its label and weight are 0.

    Example:
        >>> inputs, labels, weights = next_tokens(tf.constant([5, 6, 7]))
        >>> labels.numpy().tolist(), weights.numpy().tolist()
        ([6, 7, 0], [1.0, 1.0, 0.0])
    """
    length = tf.size(document)
    inputs = {"tokens": document, "segments": tf.ones_like(document), "positions": tf.range(length)}
    weights = tf.cast(tf.range(length) < length - 1, tf.float32)
    return inputs, tf.concat([document[1:], tf.zeros_like(document[:1])], 0), weights


@dataclass(frozen=True, slots=True, eq=False)
class _Documents:
    """Tokens of all documents one after the other, and where each begins and ends."""

    flat: Any  # a source whose examples are the tokens
    starts: Any  # int64 (documents)
    ends: Any
    changes: str = ""  # as in Source

    @property
    def name(self) -> str:
        return "tokens" if self.flat.name == "arrays" else f"tokens of {self.flat.name}"

    def read(self, places: Any) -> Any:
        """The tokens at these places, in a graph."""
        return tf.cast(self.flat.decode(places), tf.int32)

    def fingerprint(self) -> list[Any]:
        return [self.flat.fingerprint(), self.starts, self.ends]

    def only(self, numbers: Any) -> "_Documents":
        """Those with these numbers, or of a slice."""
        return replace(self, starts=self.starts[numbers], ends=self.ends[numbers])


def _by_document(documents: _Documents) -> Source:
    tables = (documents.starts, documents.ends)

    def document(number: Any) -> Any:
        starts, ends = held_on_host(lambda: tuple(map(tf.constant, tables)))
        return documents.read(tf.range(tf.gather(starts, number), tf.gather(ends, number)))

    source = gathered(
        documents.name,
        len(documents.starts),
        document,
        None,
        fingerprint=documents.fingerprint,
        packed=lambda size, some: _in_rows(documents.only(some), size),
        changes=documents.changes,
        note=f"{int((documents.ends - documents.starts).sum()):,} tokens",
    )
    # Whole documents are divided, for a part may be packed too.
    return replace(
        source,
        part=lambda index, parts: _by_document(documents.only(slice(index, None, parts))),
        fingerprint=documents.fingerprint,
    )


def _in_rows(documents: _Documents, size: int) -> Source:
    packing = pack(documents.ends - documents.starts, size)
    count = len(packing.rows) - 1
    if not count:
        raise PipelineError(
            f"Expected at least one token to pack. Found none in these {len(documents.starts):,} documents. Leave out "
            "empty ones, or pass another `split`."
        )
    used = int(packing.lengths.sum()) / (size * count)
    note = f"{len(documents.starts):,} documents, packed into rows of {size:,} tokens; {100 * used:.1f} % of them used"
    starts = documents.starts[packing.documents] + packing.offsets
    tables = (packing.rows, starts, packing.lengths, documents.ends[packing.documents])

    def packed(row: Any) -> Any:
        rows, starts, lengths, ends = held_on_host(lambda: tuple(map(tf.constant, tables)))
        firsts = tf.gather(rows, row)
        of_rows = tf.ragged.range(firsts, tf.gather(rows, row + 1))
        pieces, rows_of_pieces = of_rows.flat_values, of_rows.value_rowids()
        begins, sizes = tf.gather(starts, pieces), tf.gather(lengths, pieces)
        segments = tf.cast(pieces - tf.gather(firsts, rows_of_pieces) + 1, tf.int32)
        places = tf.ragged.range(begins, begins + sizes)
        index, piece = places.flat_values, places.value_rowids()
        known = index + 1 < tf.gather(tf.gather(ends, pieces), piece)  # whether the next token is of the same document
        used = tf.math.segment_sum(sizes, rows_of_pieces)  # no row is without a piece

        def filled(values: Any) -> Any:
            return tf.RaggedTensor.from_row_lengths(values, used, validate=False).to_tensor(shape=(None, size))

        inputs = {
            "tokens": filled(documents.read(index)),
            "segments": filled(tf.gather(segments, piece)),
            "positions": filled(tf.cast(index - tf.gather(begins, piece), tf.int32)),
        }
        labels = documents.read(tf.where(known, index + 1, index))
        return inputs, filled(tf.where(known, labels, 0)), filled(tf.cast(known, tf.float32))

    def row(number: Any) -> Any:
        return tf.nest.map_structure(lambda part: part[0], packed(number[tf.newaxis]))

    return gathered(
        documents.name,
        count,
        row,
        packed,
        fingerprint=lambda: [size, *documents.fingerprint()],
        changes=documents.changes,
        note=note,
    )


def _tokenized(documents: Any, tokenize: Callable[[list[str]], Any]) -> _Documents:
    texts = documents.tolist() if isinstance(documents, np.ndarray) else documents
    if not isinstance(texts, Sequence) or isinstance(texts, str | bytes):
        raise TypeError(
            f"Expected texts for `tokenize`: lines(paths), or a list of strings. Received: {type(texts).__name__}. "
            "Pass one of these."
        )
    parts = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        some = [text.decode() if isinstance(text, bytes) else text for text in texts[start : start + _TEXTS_AT_ONCE]]
        ids = tokenize(some)
        ids = ids.to_list() if isinstance(ids, tf.RaggedTensor) else ids
        if not isinstance(ids, Sequence) or len(ids) != len(some):
            found = f"{len(ids):,}" if isinstance(ids, Sequence) else type(ids).__name__
            raise PipelineError(
                f"Expected a list of ids for each of {len(some):,} texts from `tokenize`. Found: {found}. Return a "
                "list of lists without padding, such as tokenizer(texts)['input_ids'], or [encode(text) for text in "
                "texts] with a function of one text."
            )
        parts += _as_arrays(ids, start)
    return _joined(parts)


def _read(documents: Any) -> tuple[list[Any], str]:
    """Returns the documents of a source or dataset, which is read whole, and what may change them the next time."""
    changes, elements = "", documents
    if isinstance(documents, Source):
        changes, elements = documents.changes, documents.dataset()
        if documents.decode is not None:
            elements = elements.map(documents.decode, num_parallel_calls=tf.data.AUTOTUNE)
    found = next((each for each in find_in_dataset(elements) if each.kind in CHANGING), None)
    if not changes and found is not None:
        changes = f"{found} in the documents"
    elements = dense(elements)
    if not isinstance(elements.element_spec, tf.TensorSpec):
        raise TypeError(
            f"Expected a source of documents, each one tensor. Received one of {elements.element_spec}. Map it to the "
            "ids or the text of each first."
        )
    if int(elements.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise PipelineError(
            "Expected a number of documents. Found a dataset that never ends. Pass it without repeat()."
        )
    return list(elements.as_numpy_iterator()), changes


def _apart(documents: Any) -> _Documents:
    if isinstance(documents, tf.RaggedTensor):
        if documents.flat_values.shape.rank != 1 or documents.ragged_rank != 1:
            raise ValueError(
                f"Expected a ragged tensor of the shape (documents, None). Received: {documents.shape}. Pass one axis "
                "of tokens."
            )
        limits = documents.row_splits.numpy().astype(np.int64)
        return _Documents(_tokens_of(documents.flat_values.numpy()), limits[:-1], limits[1:])
    if not isinstance(documents, Sequence) or isinstance(documents, str | bytes):
        raise TypeError(
            "Expected documents: a list of lists or arrays of token ids, a tf.RaggedTensor, or ids one after the other "
            f"as an array or the path of a .npy file. Received: {type(documents).__name__}. For text pass `tokenize`."
        )
    return _joined(_as_arrays(documents))


def _as_arrays(documents: Sequence[Any], first: int = 0) -> list[Any]:
    parts = []
    for number, document in enumerate(documents, first):
        part = np.asarray(document)
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise TypeError(
                f"Expected a list or array of token ids for each document. Received for document {number}: "
                f"{part.dtype} of the shape {part.shape}. For text pass `tokenize`."
            )
        if part.dtype == np.uint64:  # which becomes float64 when it is joined with another type
            _expect_ids(part)
        parts.append(part.astype(np.int32) if part.dtype == np.uint64 or not part.size else part)
    return parts


def _joined(parts: list[Any]) -> _Documents:
    flat = np.concatenate(parts) if parts else np.empty(0, np.int32)
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return _Documents(_tokens_of(flat), ends - [len(part) for part in parts], ends)


def _one_after_the_other(documents: Any, end: int | None) -> _Documents:
    if end is None:
        raise ValueError(
            "Expected `end` for documents that follow one another: the id of the token that ends each. Found none. "
            "Pass it, such as end=50256, or pass a list of documents."
        )
    end = checks.integer("end", end, "Pass a token's id.", least=0)
    if isinstance(documents, np.ndarray):
        flat, source = documents, _tokens_of(documents)
    else:
        source = npy(documents)
        flat = np.load(documents, mmap_mode="r")
        _expect_ids(flat)
    ends = [
        1 + start + np.flatnonzero(flat[start : start + _AT_ONCE] == end) for start in range(0, len(flat), _AT_ONCE)
    ]
    # A last document that `end` ends has its limit twice.
    limits = np.unique(np.concatenate([[0], *ends, [len(flat)]]).astype(np.int64))
    return _Documents(source, limits[:-1], limits[1:])


def _tokens_of(flat: Any) -> Source:
    _expect_ids(flat)
    if not len(flat):
        raise PipelineError("Expected at least one token. Found none in the documents. Check what fills them.")
    return arrays(flat.astype(np.int32))


def _expect_ids(flat: Any) -> None:
    if flat.ndim != 1 or (flat.dtype.kind not in "iu"):
        raise TypeError(
            f"Expected token ids: integers, one axis. Received: {flat.dtype} of the shape {flat.shape}. Pass one "
            "document after the other, or a list of them."
        )
    if flat.dtype.itemsize > 2 and flat.dtype != np.int32:
        for start in range(0, len(flat), _AT_ONCE):
            part = flat[start : start + _AT_ONCE]
            if part.size and not (part.min() >= -_LARGEST and part.max() <= _LARGEST):
                raise ValueError("Expected ids that fit int32. Found larger ones. Check what makes them.")
