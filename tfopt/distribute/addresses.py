"""Addresses of workers: "host:port", as TensorFlow's gRPC server and clients take them."""

import ipaddress
import re
import reprlib
from dataclasses import dataclass

from tfopt.errors import ClusterError

# An IPv6 address stands in brackets, or its last part could not be told from a port.
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]*)\]|(?P<name>[^][:]*)):(?P<port>[^:]*)")
_IPV6_CHARACTERS = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")  # Python takes any character after %
# Underscores are no part of DNS, yet Docker Compose's names of hosts have them.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker's server listens.

    Attributes:
        host: A name or an IP address, an IPv6 address without its brackets.
        port: 1 to 65535.
    """

    host: str
    port: int

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as an IP address; None for a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def machine(self) -> str:
        """The host as a key: the same for two spellings of one host, and for all names of this machine's loopback."""
        ip = self.ip
        if ip is None:
            return self.host.lower().rstrip(".")
        return "localhost" if ip.is_loopback else str(ip)


def parse_address(text: object, *, whose: str) -> Address:
    """Reads "host:port", "192.0.2.1:port" or "[2001:db8::1]:port".

    Args:
        text: The address, as it came from outside.
        whose: Named in the error, as "worker 3 of TF_CONFIG".

    Raises:
        ClusterError: It is no such address.

    Example:
        >>> parse_address("[::1]:2222", whose="worker 0")
        Address(host='::1', port=2222)
    """
    fault = "that is not a text"
    if isinstance(text, str):
        found = _ADDRESS.fullmatch(text)
        fault = "it has not this form" if found is None else _fault(**found.groupdict())
        if found is not None and not fault:
            return Address(found["ipv6"] or found["name"], int(found["port"]))
    raise ClusterError(
        f"Expected the address of {whose} as 'host:port', an IPv6 address in brackets, the port from 1 to 65535. "
        f"Found: {brief(text)}; {fault}. What to do: correct this address, for every worker alike."
    )


def brief(value: object) -> str:
    """A value from outside, as an error may show it: on one line and not long."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value)


def _fault(*, ipv6: str | None, name: str | None, port: str) -> str:
    """What is wrong with the parts of an address; empty if nothing is."""
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return f"the port is {brief(port)}"
    if ipv6 is not None:
        valid = _IPV6_CHARACTERS.fullmatch(ipv6) and isinstance(Address(ipv6, int(port)).ip, ipaddress.IPv6Address)
        return "" if valid else f"{brief(ipv6)} is no IPv6 address"
    return "" if _HOST.fullmatch(name or "") else f"{brief(name)} is no name of a host"


def wrong(expected: str, found: str, remedy: str) -> ClusterError:
    """The error for an environment that describes a cluster wrongly, in three parts."""
    return ClusterError(f"Expected {expected}. Found: {found}. What to do: {remedy}.")
