"""Slurm's host lists: "n[1-3,7],login" names n1, n2, n3, n7 and login."""

import itertools
import math
import re

from tfopt.distribute.cluster.addresses import brief, cluster_error
from tfopt.errors import ClusterError

# Slurm's own limit for a range. More is a typo: n[1-999999999] would exhaust memory.
MAX_HOSTS = 65536
_MAX_NAME_CHARACTERS = 253  # DNS

_ENTRY = r"(?:[^][,\s]|\[[^][]*\])+"
_HOST_LIST = re.compile(rf"{_ENTRY}(?:,{_ENTRY})*")
_GROUP = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expands a host list as `scontrol show hostnames` does: in Slurm's order, duplicates included.

    It also accepts a suffix after the brackets (node[1-2]-ib), which Slurm 22.05 refuses.

    Args:
        text: Comma-separated names, each with any number of bracketed numbers and ranges. Numbers are padded to the
            width of the range's start: n[08-10] is n08, n09 and n10.

    Raises:
        ClusterError: If `text` is not a host list, or names more than 65,536 hosts.

    Example:
        >>> expand_hosts("n[9-10],r[1-2]s[1-2]")
        ('n9', 'n10', 'r1s1', 'r1s2', 'r2s1', 'r2s2')
    """
    if not _HOST_LIST.fullmatch(text):
        raise _list_error(text, "unbalanced brackets, a misplaced comma or a space")
    hosts: list[str] = []
    for entry in re.findall(_ENTRY, text):
        literals, groups = _GROUP.split(entry)[::2], [_ranges(group, text) for group in _GROUP.findall(entry)]
        count = math.prod(sum(len(numbers) for numbers, _ in group) for group in groups)
        if len(hosts) + count > MAX_HOSTS:
            raise _list_error(text, f"it names more than {MAX_HOSTS} hosts")
        if sum(map(len, literals)) + sum(max(width for _, width in group) for group in groups) > _MAX_NAME_CHARACTERS:
            raise _list_error(text, f"one of its names is longer than {_MAX_NAME_CHARACTERS} characters")
        hosts += _entry_names(literals, groups)
    return tuple(hosts)


def _ranges(group: str, text: str) -> list[tuple[range, int]]:
    """The ranges of a bracketed group, each with the width its numbers are padded to."""
    found = []
    for part in group.split(","):
        match = _RANGE.fullmatch(part)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if match is None or not numbers:
            raise _list_error(text, f"{brief(part)} is neither a number nor a range")
        found.append((numbers, len(match[1])))
    return found


def _entry_names(literals: list[str], groups: list[list[tuple[range, int]]]) -> list[str]:
    """The names of one entry. As in Slurm, the last group varies fastest, then the first, the second, and so on."""
    if not groups:
        return literals
    *rest, last = [[f"{number:0{width}}" for numbers, width in group for number in numbers] for group in groups]
    names = []
    for values in itertools.product(*reversed(rest), last):
        numbers = [*reversed(values[:-1]), values[-1], ""]
        names.append("".join(itertools.chain.from_iterable(zip(literals, numbers, strict=True))))
    return names


def _list_error(text: str, fault: str) -> ClusterError:
    return cluster_error(
        "a host list as Slurm writes it, n[1-3,07],login",
        f"{brief(text)}; {fault}",
        "pass Slurm's variables on as srun set them; scontrol show hostnames shows what a list expands to",
    )
