"""Image files: what their first and last bytes say, and whether TensorFlow decodes them."""

import contextlib
import hashlib
import json
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.files import write_atomic
from tfopt.pipelines.shared.elements import first_line, without_autograph
from tfopt.pipelines.shared.paths import for_each_path, kept_of_images
from tfopt.pipelines.shared.problems import Problem, Report, listed

_KEPT_FROM = 1000  # files; fewer are looked at in a moment
_KEPT_FORMAT = 3

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
_ORIENTATION = 0x0112  # EXIF's tag
_JPEG_END = b"\xff\xd9"
# In a graph: the first two bytes of each format, the last two, and which bits of these are certain.
_FIRST = np.frombuffer(b"\xff\xd8\x89PGIBMRI", "<u2")
_LAST = np.frombuffer(b"\xff\xd9\x60\x82\0\x3b\0\0\0\0", "<u2")
_CERTAIN = np.array([0xFFFF, 0xFFFF, 0xFF00, 0, 0], np.uint16)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """What was found of a file."""

    format: str  # "JPEG", "PNG", "GIF", "BMP" or "WebP"; "" for none of these
    ends: bool  # whether its last bytes are those that end such a file; others may follow an image
    problem: Problem | None
    lost: tuple[str, ...] = ()  # what of it no pixel shows, of `_LOST`
    decoded: bool = False  # whether all of it was decoded
    stamp: tuple[int, ...] = ()  # size and times; another file has another one


@dataclass(frozen=True, slots=True, repr=False)
class ImagesReport(Report):
    """What `verify_images` found: the number of files that it decoded, and a problem for each that does not decode."""

    def __str__(self) -> str:
        files = f"{self.files:,} image{'s' * (self.files != 1)}"
        if self.passed:
            return f"{files}: every one decodes"
        return f"{files}: {len(self.problems):,} problem{'s' * (len(self.problems) != 1)}\n{listed(self.problems)}"


def examine(paths: Sequence[str], *, decoding: bool, again: bool = False) -> list[ImageFile]:
    """Looks at the first and last bytes of each file, and decodes those that do not end as they should.

    `decoding` decodes all of them, which finds whatever TensorFlow cannot decode. What was found of many files is kept
    for the next time, unless `again` looks anew.
    """
    where = _kept_at(paths) if len(paths) >= _KEPT_FROM else None
    known = {} if where is None or again else _kept(where)
    found = for_each_path(lambda path: _look(path, known.get(path), decoding=decoding), paths)
    new = {path: each for path, each in zip(paths, found, strict=True) if each.stamp and known.get(path) != each}
    if where is not None and new:
        _keep(where, known | new)
    return found


def is_image(path: str) -> bool:
    """Whether a file begins like an image; False for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return bool(_format(file.read(12)))
    except OSError:
        return False


def unhonoured(found: Sequence[ImageFile]) -> str:
    """Returns what the plan says of files whose pixels are not used as they are meant."""
    counts = {lost: sum(lost in each.lost for each in found) for lost in _LOST}
    return "; ".join(f"{count:,} of {len(found):,} files {_LOST[lost]}" for lost, count in counts.items() if count)


def refusal(problems: Sequence[Problem]) -> PipelineError:
    """Returns the error that names the files."""
    return PipelineError(
        f"Expected images that TensorFlow decodes. Found {len(problems):,} that it does not:\n{listed(problems)}\n"
        "Remove or convert them, or pass on_bad_file='skip', which leaves such files out. verify_images also finds "
        "those that are damaged inside."
    )


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
    try:
        if known is not None and known.stamp == _stamp(os.stat(path)) and (known.decoded or not decoding):
            return known
        if not stat.S_ISREG(os.stat(path).st_mode):  # unopened: opening a pipe can block
            return ImageFile("", False, Problem(path, "unreadable", "a folder, a pipe or a device"))
        with open(path, "rb") as file:
            status, head = os.fstat(file.fileno()), file.read(_HEAD_BYTES)
            file.seek(max(0, status.st_size - 2))
            form, ends = _format(head), _ends(head, file.read(2), status.st_size)
            problem = _wrong_head(path, head)
            decodes = problem is None and (decoding or not ends)
            if decodes:
                file.seek(0)
                problem = _undecodable(path, form, file.read(), ends=ends)
            lost = _lost(form, head, file)
    except OSError as error:
        return ImageFile("", False, Problem(path, "unreadable", f"Cannot read it: {error.strerror}"))
    return ImageFile(
        form,
        ends,
        problem,
        lost=tuple(lost),
        decoded=decodes or problem is not None,
        stamp=_stamp(status),
    )


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _kept_at(paths: Sequence[str]) -> Path:
    """Returns the file in which is kept what was found of files, by the folder that holds them all."""
    folder = os.path.commonpath([os.path.abspath(path) for path in (min(paths), max(paths))])  # of all between, too
    name = hashlib.sha256(folder.encode()).hexdigest()[:32]
    return kept_of_images() / f"{name}.json"


def _kept(where: Path) -> dict[str, ImageFile]:
    """Returns what was found of files by their paths; nothing if it was not kept, or by another TensorFlow."""
    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
        if kept["format"] != [_KEPT_FORMAT, tf.__version__]:
            return {}
        return {
            path: ImageFile(form, ends, problem and Problem(path, *problem), tuple(lost), decoded, tuple(stamp))
            for path, (form, ends, problem, lost, decoded, stamp) in kept["files"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _keep(where: Path, found: dict[str, ImageFile]) -> None:
    files = {
        path: [
            each.format,
            each.ends,
            each.problem and [each.problem.kind, each.problem.what],
            each.lost,
            each.decoded,
            each.stamp,
        ]
        for path, each in found.items()
    }
    with contextlib.suppress(OSError):  # the next plan looks again
        write_atomic(where, json.dumps({"format": [_KEPT_FORMAT, tf.__version__], "files": files}))


def _format(head: bytes) -> str:
    name = next((name for begins, name in _BEGINNINGS.items() if head.startswith(begins)), "")
    return "" if name == "WebP" and head[8:12] != b"WEBP" else name


def _ends(head: bytes, last: bytes, size: int) -> bool:
    form = _format(head)
    if form == "BMP":
        return struct.unpack_from("<I", head.ljust(6, b"\0"), 2)[0] == size
    if form == "WebP":
        return bool(struct.unpack_from("<I", head, 4)[0] + 8 == size)
    return last.endswith({"JPEG": _JPEG_END, "PNG": b"\x60\x82", "GIF": b"\x3b"}.get(form, b""))


def _wrong_head(path: str, head: bytes) -> Problem | None:
    """Returns why a file is not an image, or would decode to wrong colours."""
    form = _format(head)
    if not head:
        return Problem(path, "empty", "an empty file")
    if not form:
        what = f"a file that begins with {head[:8]!r}, unlike JPEG, PNG, GIF, BMP and WebP"
        return Problem(path, "no image", what)
    if form == "BMP" and not _bmp_decodes(head):
        what = "a BMP with a palette, compression or unusual masks, whose colours would be wrong. Convert it to PNG"
        return Problem(path, "unsupported", what)
    if form == "WebP" and head[12:16] == b"VP8X" and head[20] & 2:
        return Problem(path, "unsupported", "an animated WebP. Convert it to GIF, or its first frame to PNG")
    if form == "WebP" and _webp_has_alpha(head):
        return Problem(path, "unsupported", "a WebP with transparency. Convert it to PNG")
    return None


def _webp_has_alpha(head: bytes) -> bool:
    """Whether TensorFlow decodes a WebP to four channels only."""
    flags = {b"VP8X": head[20:21], b"VP8L": head[24:25]}.get(head[12:16], b"")
    return bool(flags) and bool(flags[0] & 0x10)


def _undecodable(path: str, form: str, contents: bytes, *, ends: bool) -> Problem | None:
    try:
        with tf.device("CPU:0"):
            decode_image(contents)
    except (tf.errors.OpError, ValueError) as error:
        if ends:
            return Problem(path, "altered", f"a {form} that TensorFlow cannot decode: {first_line(error)}")
        return Problem(path, "cut", f"a {form} that is cut, and does not decode: {first_line(error)}")
    return None


def _lost(form: str, head: bytes, file: BinaryIO) -> list[str]:
    """Returns what of an image no pixel shows, of `_LOST`."""
    if form == "JPEG":
        return ["orientation"] * _is_turned(head)
    if form == "GIF":
        return _lost_of_gif(file)
    return _lost_of_png(head) if form == "PNG" else []


def _lost_of_png(head: bytes) -> list[str]:
    before = head.partition(b"IDAT")[0]  # where a palette's transparency and the number of frames stand
    transparent = head[25:26] in (b"\x04", b"\x06") or b"tRNS" in before
    return ["bits"] * (head[24:25] == b"\x10") + ["transparency"] * transparent + ["frames"] * _is_animated(before)


def _is_animated(before: bytes) -> bool:
    """Whether a PNG has several frames, given what precedes its pixels."""
    at = before.find(b"acTL")
    return at >= 0 and int.from_bytes(before[at + 4 : at + 8], "big") > 1


def _lost_of_gif(file: BinaryIO) -> list[str]:
    """Follows the blocks of a GIF up to its second image; one that is cut has what comes before."""
    file.seek(10)
    file.seek(13 + _colours(file.read(1)))
    frames, transparent = 0, False
    while frames < 2 and (mark := file.read(1)) in (b"!", b","):
        if mark == b",":
            frames += 1
            file.seek(_colours(file.read(9)[8:]) + 1, os.SEEK_CUR)
        else:
            begun = file.read(3)  # of the first frame: its kind, its length and its flags
            transparent |= not frames and begun[:1] == b"\xf9" and bool(begun[2:] and begun[2] & 1)
            file.seek(-2, os.SEEK_CUR)
        while (length := file.read(1)) not in (b"", b"\0"):
            file.seek(length[0], os.SEEK_CUR)
    return ["transparency"] * transparent + ["frames"] * (frames > 1)


def _colours(flags: bytes) -> int:
    """The bytes of a GIF's table of colours; none where the flags are missing."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _is_turned(head: bytes) -> bool:
    """Whether the EXIF data of a JPEG have an orientation other than upright."""
    at = head.find(b"Exif\0\0")
    if at < 0:
        return False
    exif = head[at + 6 :]
    order = "<" if exif.startswith(b"II") else ">"
    with contextlib.suppress(struct.error):
        (directory,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if (tag, kind, count) == (_ORIENTATION, 3, 1):
                return 2 <= value <= 8
    return False


def _bmp_decodes(head: bytes) -> bool:
    """Whether TensorFlow decodes a BMP's colours correctly: it takes palette indices for shades of grey."""
    if len(head) < 34:
        return False
    header_bytes, bits, compression = (*struct.unpack_from("<I", head, 14), *struct.unpack_from("<HI", head, 28))
    if bits == 32 and compression == 3:
        return head[54:66] == _BMP_MASKS
    if bits in (24, 32):
        return compression == 0
    palette = head[14 + header_bytes :][: 4 * 256]
    grey = all(palette[channel::4] == bytes(range(256)) for channel in range(3))
    return bits == 8 and compression == 0 and grey
