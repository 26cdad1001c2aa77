"""Image files: what their first and last bytes say, and whether TensorFlow decodes them."""

import contextlib
import hashlib
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf

from tfopt.files import write_atomic
from tfopt.pipelines.shared.elements import first_line, without_autograph
from tfopt.pipelines.shared.paths import for_each_path, kept_of_images
from tfopt.pipelines.shared.problems import Problem, Report, head_of, listed, read_from

_KEPT_FROM = 1000  # files; fewer are looked at in a moment
_KEPT_FORMAT = [3, tf.__version__]

# One page of a disk. The largest BMP header (124 bytes) and the palette of an 8-bit BMP fit, and the EXIF data's first
# directory, which follows the beginning of a JPEG.
_HEAD_BYTES = 4096
_BMP_MASKS = struct.pack("<3I", 0xFF0000, 0xFF00, 0xFF)  # red, green and blue, where TensorFlow assumes them
_BEGINNINGS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"RIFF": "WebP",
}
_LOST = {
    "orientation": "are to be shown turned, by EXIF, and come as stored: turn them beforehand",
    "bits": "have 16 bits, of which the upper 8 are kept",
    "transparency": "have transparency, which is dropped",
    "frames": "have several frames, of which the first is used",
}
# The entry of EXIF's first directory: its tag, one 16-bit number, and that, in either order of bytes.
_ORIENTATION = re.compile(
    rb"Exif\0\0(?:II.*?\x12\x01\x03\0\x01\0{3}(.)\0|MM.*?\x01\x12\0\x03\0{3}\x01\0(.))", re.DOTALL
)
_JPEG_END = b"\xff\xd9"
# In a graph: the first two bytes of each format, the last two, and which bits of these are certain.
_FIRST = np.frombuffer(b"\xff\xd8\x89PGIBMRI", "<u2")
_LAST = np.frombuffer(b"\xff\xd9\x60\x82\0\x3b\0\0\0\0", "<u2")
_CERTAIN = np.array([0xFFFF, 0xFFFF, 0xFF00, 0, 0], np.uint16)


class ImageFile(NamedTuple):
    """What was found of a file; kept as JSON, in the order of the fields."""

    format: str  # "JPEG", "PNG", "GIF", "BMP" or "WebP"; "" for none of these
    ends: bool  # whether its last bytes are those that end such a file; others may follow an image
    problem: list[str] | None  # its kind, and the problem in words
    lost: list[str]  # what of it no pixel shows, of `_LOST`
    decoded: bool  # whether all of it was decoded
    stamp: list[int]  # size and times; another file has another one

    def problem_of(self, path: str) -> Problem | None:
        """Returns the problem of the file at this path."""
        return None if self.problem is None else Problem(path, self.problem[0], self.problem[1])


@dataclass(frozen=True, slots=True, repr=False)
class ImagesReport(Report):
    """What `verify_images` found: the number of files that it decoded, and a problem for each that does not decode."""

    def __str__(self) -> str:
        files = f"{self.files:,} image{'s' * (self.files != 1)}"
        if self.passed:
            return f"{files}: every one decodes"
        return f"{files}: {len(self.problems):,} problem{'s' * (len(self.problems) != 1)}\n{listed(self.problems)}"


def examine(paths: Sequence[str], *, decoding: bool, again: bool = False) -> list[tuple[Problem | None, ImageFile]]:
    """Looks at the first and last bytes of each file, and decodes those that do not end as they should.

    `decoding` decodes all of them, which finds whatever TensorFlow cannot decode. What was found of many files is kept
    for the next time, unless `again` looks anew.
    """
    where = _kept_at(paths) if len(paths) >= _KEPT_FROM else None
    known = {} if where is None or again else _kept(where)
    found = for_each_path(lambda path: _look(path, known.get(path), decoding=decoding), paths)
    new = {path: each for path, each in zip(paths, found, strict=True) if each.stamp and known.get(path) != each}
    if where is not None and new:
        with contextlib.suppress(OSError):  # the next plan looks again
            write_atomic(where, json.dumps({"format": _KEPT_FORMAT, "files": known | new}))
    return [(each.problem_of(path), each) for path, each in zip(paths, found, strict=True)]


def is_image(path: str) -> bool:
    """Whether a file begins like an image; False for one that cannot be read."""
    head = head_of(path, 12)
    return not isinstance(head, Problem) and bool(_format(head))


def unhonoured(found: Sequence[ImageFile]) -> str:
    """Returns what the plan says of files whose pixels are not used as they are meant."""
    counts = {lost: sum(lost in each.lost for each in found) for lost in _LOST}
    return "; ".join(f"{count:,} of {len(found):,} files {_LOST[lost]}" for lost, count in counts.items() if count)


@without_autograph
def decode_image(contents: Any) -> Any:
    """Decodes a JPEG, PNG, GIF (first frame), BMP or WebP to (height, width, 3) uint8, in a graph."""
    # The decoder's own error names no file, but its operation.
    with tf.name_scope("verify_images_names_the_file"):
        image = tf.io.decode_image(contents, channels=3, expand_animations=False)
    image.set_shape((None, None, 3))
    return image


@without_autograph
def expect_image_bytes(contents: Any, name: Any, *, ends: bool = False, only_jpeg: bool = False) -> Any:
    """Returns the contents of an image file, in a graph; fails, naming it, if they do not begin like an image.

    With `ends` also if they do not end like one: files are checked when a pipeline is planned, but may change later,
    and a crop above the cut would decode.
    """
    if ends and only_jpeg:
        # What does not end like a JPEG is none: half of the operations, and this runs for each image.
        with tf.name_scope("verify_images_names_the_file"):  # an empty one has no last bytes
            known = tf.equal(tf.strings.substr(contents, -2, 2), _JPEG_END)
    else:
        begins = tf.io.decode_raw(tf.strings.substr(contents, 0, 2), tf.uint16, fixed_length=2)
        known = tf.equal(begins, _FIRST)
        if ends:
            two = tf.minimum(tf.strings.length(contents), 2)
            last = tf.io.decode_raw(tf.strings.substr(contents, -two, two), tf.uint16, fixed_length=2)
            known &= tf.equal(tf.bitwise.bitwise_and(last, _CERTAIN), _LAST)
        known = tf.reduce_any(known)
    # tf.debugging.Assert would add a branch.
    check = tf.raw_ops.Assert(condition=known, data=["Not a whole JPEG, PNG, GIF, BMP or WebP image:", name])
    with tf.control_dependencies([check]):
        return tf.identity(contents)


def _look(path: str, known: ImageFile | None, *, decoding: bool) -> ImageFile:
    def read(file: BinaryIO) -> ImageFile:
        stamp, head = _stamp(os.fstat(file.fileno())), file.read(_HEAD_BYTES)
        file.seek(max(0, stamp[0] - 2))
        form, ends = _format(head), _ends(head, file.read(2), stamp[0])
        problem = _wrong_head(form, head)
        decoded = problem is not None or decoding or not ends
        if decoded and problem is None:
            file.seek(0)
            problem = _undecodable(form, file.read(), ends=ends)
        return ImageFile(form, ends, problem, [] if problem else _lost(form, head, file), decoded, stamp)

    with contextlib.suppress(OSError):
        if known is not None and known.stamp == _stamp(os.stat(path)) and (known.decoded or not decoding):
            return known
    found = read_from(path, read)
    return ImageFile("", False, [found.kind, found.what], [], False, []) if isinstance(found, Problem) else found


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _kept_at(paths: Sequence[str]) -> Path:
    """Returns the file in which is kept what was found of files, by the folder that holds them all."""
    folder = os.path.commonpath([os.path.abspath(path) for path in (min(paths), max(paths))])  # of all between, too
    name = hashlib.sha256(folder.encode()).hexdigest()[:32]
    return kept_of_images() / f"{name}.json"


def _kept(where: Path) -> dict[str, ImageFile]:
    """Returns what was found of files by their paths; nothing if it was not kept, or by another TensorFlow."""
    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
        if kept["format"] != _KEPT_FORMAT:
            return {}
        return {path: ImageFile(*each) for path, each in kept["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _format(head: bytes) -> str:
    name = next((name for begins, name in _BEGINNINGS.items() if head.startswith(begins)), "")
    return "" if name == "WebP" and head[8:12] != b"WEBP" else name


def _ends(head: bytes, last: bytes, size: int) -> bool:
    form = _format(head)
    if form == "BMP":
        return _number(head, 2, 6) == size
    if form == "WebP":
        return _number(head, 4, 8) + 8 == size
    return last.endswith({"JPEG": _JPEG_END, "PNG": b"\x60\x82", "GIF": b"\x3b"}.get(form, b""))


def _wrong_head(form: str, head: bytes) -> list[str] | None:
    """Returns why a file is not an image, or would decode to wrong colours."""
    chunk, flags = head[12:16], _number(head, 20, 21)
    if not head:
        return ["empty", "an empty file"]
    if not form:
        return ["no image", f"a file that begins with {head[:8]!r}, unlike JPEG, PNG, GIF, BMP and WebP"]
    if form == "BMP" and not _bmp_decodes(head):
        what = "a BMP with a palette, compression or unusual masks, whose colours would be wrong. Convert it to PNG"
    elif form == "WebP" and chunk == b"VP8X" and flags & 2:
        what = "an animated WebP. Convert it to GIF, or its first frame to PNG"
    elif form == "WebP" and {b"VP8X": flags, b"VP8L": _number(head, 24, 25)}.get(chunk, 0) & 0x10:
        what = "a WebP with transparency. Convert it to PNG"  # which TensorFlow decodes to four channels only
    elif form == "WebP" and not hasattr(tf.raw_ops, "DecodeWebP"):
        what = "a WebP, which TensorFlow decodes from 2.20 on. Convert it to PNG"
    else:
        return None
    return ["unsupported", what]


def _bmp_decodes(head: bytes) -> bool:
    """Whether TensorFlow decodes a BMP's colours correctly: it takes palette indices for shades of grey."""
    bits, compression = _number(head, 28, 30), _number(head, 30, 34)
    if bits == 32 and compression == 3:
        return head[54:66] == _BMP_MASKS
    palette = head[14 + _number(head, 14, 18) :][: 4 * 256]
    is_grey = all(palette[channel::4] == bytes(range(256)) for channel in range(3))
    return compression == 0 and (bits in (24, 32) or (bits == 8 and is_grey))


def _number(head: bytes, start: int, end: int) -> int:
    """Returns the number in some bytes of a BMP or WebP, unsigned."""
    return int.from_bytes(head[start:end], "little")


def _undecodable(form: str, contents: bytes, *, ends: bool) -> list[str] | None:
    try:
        with tf.device("CPU:0"):
            decode_image(contents)
    except (tf.errors.OpError, ValueError) as error:
        if ends:
            return ["altered", f"a {form} that TensorFlow cannot decode: {first_line(error)}"]
        return ["cut", f"a {form} that is cut, and does not decode: {first_line(error)}"]
    return None


def _lost(form: str, head: bytes, file: BinaryIO) -> list[str]:
    """Returns what of an image no pixel shows, of `_LOST`."""
    if form == "JPEG":
        found = _ORIENTATION.search(head)
        return ["orientation"] * bool(found and 2 <= (found[1] or found[2])[0] <= 8)
    if form == "GIF":
        return _lost_of_gif(file)
    return _lost_of_png(head) if form == "PNG" else []


def _lost_of_png(head: bytes) -> list[str]:
    before = head.partition(b"IDAT")[0]  # where a palette's transparency and the number of frames stand
    transparent = head[25:26] in (b"\x04", b"\x06") or b"tRNS" in before
    frames = int.from_bytes(before.partition(b"acTL")[2][:4])
    return ["bits"] * (head[24:25] == b"\x10") + ["transparency"] * transparent + ["frames"] * (frames > 1)


def _lost_of_gif(file: BinaryIO) -> list[str]:
    """Follows the blocks of a GIF up to its second image; one that is cut has what comes before."""

    def byte(at: int) -> int:
        file.seek(at)
        return file.read(1)[0]

    def colours(at: int) -> int:  # the bytes of the table that flags announce
        return 3 << (byte(at) & 7) + 1 if byte(at) & 0x80 else 0

    frames, transparent = 0, False
    with contextlib.suppress(IndexError):
        at = 13 + colours(10)
        while frames < 2 and byte(at) in b"!,":
            if byte(at) == ord(","):
                frames += 1
                at += 11 + colours(at + 9)
            else:  # of the first frame: its kind, its length and its flags
                transparent |= not frames and byte(at + 1) == 0xF9 and bool(byte(at + 3) & 1)
                at += 2
            while length := byte(at):
                at += 1 + length
            at += 1
    return ["transparency"] * transparent + ["frames"] * (frames > 1)
