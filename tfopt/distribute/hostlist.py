"""Slurm's lists of hosts: "n[1-3,7],login" are n1, n2, n3, n7 and login."""

import itertools
import math
import re

from tfopt.distribute.addresses import brief
from tfopt.errors import ClusterError

# What Slurm takes in one range: more is a slip of the hand, and n[1-999999999] would fill the memory.
MOST_HOSTS = 65536
_MOST_CHARACTERS = 253  # of a name in DNS

_ENTRY = r"(?:[^][,\s]|\[[^][]*\])+"
_HOSTLIST = re.compile(rf"{_ENTRY}(?:,{_ENTRY})*")
_GROUP = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str) -> tuple[str, ...]:
    """Returns the names in a list of hosts, in Slurm's order and as often as they are there.

    It is what `scontrol show hostnames` prints, without asking Slurm: for SLURM_STEP_NODELIST and the like. Names with
    something after the brackets, as node[1-2]-ib, are expanded too, which Slurm 22.05 refuses.

    Args:
        text: Names with commas between them; each may hold any number of groups in brackets, of numbers and ranges.
            Zeros in front of a range's first number are kept: n[08-10] are n08, n09 and n10.

    Raises:
        ClusterError: It is no such list, or one of more than 65,536 hosts.

    Example:
        >>> expand("n[9-10],r[1-2]s[1-2]")
        ('n9', 'n10', 'r1s1', 'r1s2', 'r2s1', 'r2s2')
    """
    if not _HOSTLIST.fullmatch(text):
        raise _error(text, "its brackets or commas do not fit, or there is a space in it")
    hosts: list[str] = []
    for entry in re.findall(_ENTRY, text):
        literals, groups = _GROUP.split(entry)[::2], [_ranges(group, text) for group in _GROUP.findall(entry)]
        count = math.prod(sum(len(numbers) for numbers, _ in group) for group in groups)
        if len(hosts) + count > MOST_HOSTS:
            raise _error(text, f"it names more than {MOST_HOSTS} hosts")
        if sum(map(len, literals)) + sum(max(width for _, width in group) for group in groups) > _MOST_CHARACTERS:
            raise _error(text, f"a name in it is longer than {_MOST_CHARACTERS} characters")
        hosts += _names(literals, [_texts(group) for group in groups])
    return tuple(hosts)


def _ranges(group: str, text: str) -> list[tuple[range, int]]:
    """The numbers of a group, and how many digits each has at least."""
    found = []
    for part in group.split(","):
        match = _RANGE.fullmatch(part)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if match is None or not numbers:
            raise _error(text, f"{brief(part)} is no number and no range of numbers")
        found.append((numbers, len(match[1])))
    return found


def _texts(group: list[tuple[range, int]]) -> list[str]:
    return [f"{number:0{width}}" for numbers, width in group for number in numbers]


def _names(literals: list[str], groups: list[list[str]]) -> list[str]:
    """The names of one entry. Its last group varies fastest, then its first, its second and so on, as in Slurm."""
    if not groups:
        return literals
    *rest, last = groups
    names = []
    for values in itertools.product(*reversed(rest), last):
        numbers = [*reversed(values[:-1]), values[-1], ""]
        names.append("".join(itertools.chain.from_iterable(zip(literals, numbers, strict=True))))
    return names


def _error(text: str, fault: str) -> ClusterError:
    return ClusterError(
        f"Expected a list of hosts as Slurm writes it, n[1-3,07],login. Found: {brief(text)}; {fault}. What to do: "
        "pass Slurm's variables on as srun has set them; scontrol show hostnames shows what a list means."
    )
