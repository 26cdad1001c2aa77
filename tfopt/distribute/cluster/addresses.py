"""Workers' addresses, "host:port", and Slurm's host lists, "n[1-3,7],login"."""

import ipaddress
import itertools
import math
import re
import reprlib
from dataclasses import dataclass

from tfopt.errors import ClusterError

# Slurm's own limit for a range. More is a typo: n[1-999999999] would fill the memory.
MAX_HOSTS = 65536
_MAX_NAME_CHARACTERS = 253  # DNS

# An IPv6 address is bracketed; otherwise its last group could be read as the port.
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]*)\]|(?P<name>[^][:]*)):(?P<port>[^:]*)")
_IPV6_CHARACTERS = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")  # ipaddress accepts anything after %
# DNS has no underscores, but Docker Compose's host names do.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")

_ENTRY = r"(?:[^][,\s]|\[[^][]*\])+"
_HOST_LIST = re.compile(rf"{_ENTRY}(?:,{_ENTRY})*")
_GROUP = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker's server listens."""

    host: str
    """A name or an IP address, IPv6 without its brackets."""
    port: int
    """1 to 65535."""

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as an IP address. None for a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def machine(self) -> str:
        """A key for the host: equal for two spellings of one host and for all names of this machine's loopback."""
        ip = self.ip
        if ip is None:
            return self.host.lower().rstrip(".")
        return "localhost" if ip.is_loopback else str(ip)


def parse_address(text: object, *, whose: str) -> Address:
    """Parses "host:port", "192.0.2.1:port" or "[2001:db8::1]:port".

    Args:
        text: The address as it came from outside.
        whose: Named in the error, such as "worker 3 of TF_CONFIG".

    Raises:
        ClusterError: If `text` is not such an address.

    Example:
        >>> parse_address("[::1]:2222", whose="worker 0")
        Address(host='::1', port=2222)
    """
    fault = "it is not a string"
    if isinstance(text, str):
        match = _ADDRESS.fullmatch(text)
        fault = "it does not have this form" if match is None else _fault(**match.groupdict())
        if match is not None and not fault:
            return Address(match["ipv6"] or match["name"], int(match["port"]))
    raise cluster_error(
        f"the address of {whose} as 'host:port', with IPv6 in brackets and a port from 1 to 65535",
        f"{brief(text)}; {fault}",
        "correct this address in every worker",
    )


def _fault(*, ipv6: str | None, name: str | None, port: str) -> str:
    """What is wrong with an address's parts; empty if nothing is."""
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return f"the port is {brief(port)}"
    if ipv6 is not None:
        valid = _IPV6_CHARACTERS.fullmatch(ipv6) and isinstance(Address(ipv6, int(port)).ip, ipaddress.IPv6Address)
        return "" if valid else f"{brief(ipv6)} is not an IPv6 address"
    return "" if _HOST.fullmatch(name or "") else f"{brief(name)} is not a host name"


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expands a host list in Slurm's order, repetitions included, as `scontrol show hostnames` does.

    Text after the brackets, as in node[1-2]-ib, is expanded too; Slurm 22.05 refuses it.

    Args:
        text: Comma-separated names, each with any number of bracketed groups of numbers and ranges. Leading zeros of a
            range's first number are kept: n[08-10] is n08, n09 and n10.

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
    """A group's ranges, each with the width its numbers are padded to."""
    found = []
    for part in group.split(","):
        match = _RANGE.fullmatch(part)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if match is None or not numbers:
            raise _list_error(text, f"{brief(part)} is neither a number nor a range")
        found.append((numbers, len(match[1])))
    return found


def _entry_names(literals: list[str], groups: list[list[tuple[range, int]]]) -> list[str]:
    """The names of one entry. As in Slurm, the last group varies fastest, then the first, the second and so on."""
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


def brief(value: object) -> str:
    """A value from outside as an error shows it: short and on one line."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value)


def cluster_error(expected: str, found: str, remedy: str) -> ClusterError:
    """The error for a cluster that is described wrongly."""
    return ClusterError(f"Expected {expected}. Found: {found}. What to do: {remedy}.")
