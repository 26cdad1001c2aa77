"""The workers of a cluster with their addresses, and which of them this process is."""

import ipaddress
import re
import reprlib
from dataclasses import dataclass, field
from typing import Any

from tfopt.errors import ClusterError
from tfopt.text import Shown, listed

ONE_PROCESS = "one process"

# More must be a mistake: a Linux environment variable holds 128 KiB, and in a ring every worker waits for all others.
MAX_WORKERS = 4096

# An IPv6 address is bracketed; otherwise its last group could be read as the port.
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]*)\]|(?P<name>[^][:]*)):(?P<port>[^:]*)")
_IPV6_CHARACTERS = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")  # ipaddress accepts anything after %
# DNS has no underscores, but Docker Compose's host names do.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")

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
        """The host as an IP address; None if it is a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def machine(self) -> str:
        """A key for the host: the same for every spelling of its name and every loopback address."""
        ip = self.ip
        if ip is None:
            return self.host.lower().rstrip(".")
        return "localhost" if ip.is_loopback else str(ip)


def parse_address(text: object, *, whose: str) -> Address:
    """Parses "host:port", "192.0.2.1:port" or "[2001:db8::1]:port".

    Raises:
        ClusterError: If `text` is not such an address; it says `whose` address it is, "worker 3 of TF_CONFIG".

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
    """What is wrong with the parts of an address, or ""."""
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return f"the port is {brief(port)}"
    if ipv6 is not None:
        valid = _IPV6_CHARACTERS.fullmatch(ipv6) and isinstance(Address(ipv6, int(port)).ip, ipaddress.IPv6Address)
        return "" if valid else f"{brief(ipv6)} is not an IPv6 address"
    return "" if _HOST.fullmatch(name or "") else f"{brief(name)} is not a host name"


@dataclass(frozen=True, slots=True, repr=False)
class Cluster(Shown):
    """The workers that train one model together, one process each.

    `tfopt.distribute.resolve()` creates it from the environment. Create one yourself only for a scheduler that tfopt
    does not support.

    Raises:
        ClusterError: If an address is malformed or listed twice, `index` is not a worker's, or there are more than
            4,096 workers.

    Example:
        >>> print(Cluster("arguments", ("10.0.0.1:2222", "10.0.0.2:2222"), 1))
        worker 1 (10.0.0.2:2222) of 2 workers, from arguments
    """

    source: str
    """Where it was found: "arguments", "TF_CONFIG", "Slurm", "Kubernetes", or "one process" if nowhere."""
    workers: tuple[str, ...] = ()
    """Addresses, "host:port", in rank order. Empty if this process trains alone."""
    index: int = 0
    """This process's rank, from 0."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Each source tried, in order, and its outcome."""

    def __post_init__(self) -> None:
        if self.source != ONE_PROCESS or self.workers:
            if not 1 <= len(self.workers) <= MAX_WORKERS:
                raise cluster_error(
                    f"1 to {MAX_WORKERS} workers from {self.source}",
                    str(len(self.workers)),
                    "list each training process once",
                )
            _check_distinct(self.addresses(), self.source)
        check_index(self.index, len(self.workers) or 1, f"the index of this worker, from {self.source},")

    @property
    def is_chief(self) -> bool:
        """Whether this process has rank 0 and so writes the checkpoints and the logs."""
        return self.index == 0

    @property
    def address(self) -> str | None:
        """This worker's address; None for a process that trains alone."""
        return self.workers[self.index] if self.workers else None

    @property
    def local_rank(self) -> int:
        """Number of workers with a lower rank on the same host."""
        machines = self._machines()
        return machines[: self.index].count(machines[self.index]) if machines else 0

    @property
    def local_workers(self) -> int:
        """Number of workers on this host, including this one."""
        machines = self._machines()
        return machines.count(machines[self.index]) if machines else 1

    def addresses(self) -> list[Address]:
        """The workers' addresses, parsed."""
        named = enumerate(self.workers)
        return [parse_address(address, whose=f"worker {rank} ({self.source})") for rank, address in named]

    def tf_config(self) -> dict[str, Any]:
        """Returns the cluster as TF_CONFIG describes it; empty for a process that trains alone.

        There is no job named "chief", so TensorFlow takes worker 0 as the chief.

        Example:
            >>> Cluster("arguments", ("a:1", "b:1"), 1).tf_config()
            {'cluster': {'worker': ['a:1', 'b:1']}, 'task': {'type': 'worker', 'index': 1}}
        """
        if not self.workers:
            return {}
        return {"cluster": {"worker": list(self.workers)}, "task": {"type": "worker", "index": self.index}}

    def explain(self) -> str:
        """Returns what this process is, and which sources were tried."""
        placement = []
        if self.workers:
            host = f"this host: local rank {self.local_rank} of {self.local_workers}"
            placement = [f"workers: {listed(self.workers, 8)}", host]
        return "\n  ".join([str(self), *self.notes, *placement])

    def __str__(self) -> str:
        if not self.workers:
            return f"this process alone, from {self.source}" if self.source != ONE_PROCESS else ONE_PROCESS
        count = "1 worker" if len(self.workers) == 1 else f"{len(self.workers)} workers"
        chief = ", the chief" if self.is_chief else ""
        return f"worker {self.index} ({self.address}{chief}) of {count}, from {self.source}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and properties as JSON values."""
        return {
            "source": self.source,
            "workers": list(self.workers),
            "index": self.index,
            "address": self.address,
            "is_chief": self.is_chief,
            "local_rank": self.local_rank,
            "local_workers": self.local_workers,
            "notes": list(self.notes),
        }

    def _machines(self) -> list[str]:
        return [address.machine for address in self.addresses()]


def check_index(index: object, count: int, what: str) -> int:
    """Returns `index`; raises ClusterError if it is not an integer from 0 to `count` - 1."""
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < count:
        return index
    raise cluster_error(
        f"{what} as an integer from 0 to {count - 1}",
        brief(index),
        "give every worker the same list of workers and its own place in it",
    )


def _check_distinct(addresses: list[Address], source: str) -> None:
    ranks: dict[tuple[str, int], int] = {}
    for rank, address in enumerate(addresses):
        first = ranks.setdefault((address.machine, address.port), rank)
        if first != rank:
            raise cluster_error(
                f"every worker from {source} to have its own address",
                f"workers {first} and {rank} both at port {address.port} of {address.host}",
                "give one of them another port or host",
            )


def brief(value: object) -> str:
    """Formats an untrusted value for an error message: short, on one line."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value)


def cluster_error(expected: str, found: str, remedy: str) -> ClusterError:
    """Returns the error for a wrong description of the cluster."""
    return ClusterError(f"Expected {expected}. Found: {found}. What to do: {remedy}.")
