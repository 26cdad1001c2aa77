"""What of a checkpoint is already stored, and how the rest goes into blobs."""

import collections
import math
from collections.abc import Callable, Iterable, Mapping

from tfopt.checkpoint.folder.blobs import BLOB_BYTES, Place
from tfopt.checkpoint.folder.contents import Content
from tfopt.checkpoint.folder.manifest import Manifest

Stored = dict[Content, Place]


def stored_before(contents: Iterable[Content], last: Manifest, is_whole: Callable[[str], bool]) -> Stored:
    """Returns which contents the last checkpoint's blobs hold, and where.

    A blob of which less than half is still needed is left behind, so that a folder holds at most twice what its
    checkpoints need.
    """
    known = {place.content: place for place in last.arrays.values()}
    found = {content: known[content] for content in contents if content in known}
    needed: collections.Counter[str] = collections.Counter()
    for content, place in found.items():
        needed[place.blob] += content.size_bytes
    kept = {
        blob for blob, used_bytes in needed.items() if 2 * used_bytes >= last.blobs[blob].data_bytes and is_whole(blob)
    }
    return {content: place for content, place in found.items() if place.blob in kept}


def groups_to_write(contents: Mapping[str, Content], stored: Stored, last: Manifest | None) -> list[dict[str, Content]]:
    """Returns the arrays to be written, in groups that share a blob; equal arrays are written once.

    Arrays unchanged since the last checkpoint get blobs apart from changed ones: they will probably stay unchanged, and
    those blobs can be reused.
    """
    known = {place.content for place in last.arrays.values()} if last else set()
    first: dict[Content, str] = {}
    for name, content in contents.items():
        if content not in stored:
            first.setdefault(content, name)
    groups: list[dict[str, Content]] = []
    for unchanged in (True, False):
        filled = math.inf  # begins a group
        for content, name in first.items():
            if (content in known) == unchanged:
                if filled + content.size_bytes > BLOB_BYTES:
                    groups.append({})
                    filled = 0
                groups[-1][name] = content
                filled += content.size_bytes
    return groups
