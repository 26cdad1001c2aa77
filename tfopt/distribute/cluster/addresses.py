"""Workers' addresses, "host:port"."""

import ipaddress
import re
import reprlib
from dataclasses import dataclass

from tfopt.errors import ClusterError

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

    Args:
        text: The address, unchecked.
        whose: Whose address it is, for the error: "worker 3 of TF_CONFIG".

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
    """What is wrong with the parts of an address, or ""."""
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return f"the port is {brief(port)}"
    if ipv6 is not None:
        valid = _IPV6_CHARACTERS.fullmatch(ipv6) and isinstance(Address(ipv6, int(port)).ip, ipaddress.IPv6Address)
        return "" if valid else f"{brief(ipv6)} is not an IPv6 address"
    return "" if _HOST.fullmatch(name or "") else f"{brief(name)} is not a host name"


def brief(value: object) -> str:
    """Formats an untrusted value for an error message: short, on one line."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value)


def cluster_error(expected: str, found: str, remedy: str) -> ClusterError:
    """Returns the error for a wrong description of the cluster."""
    return ClusterError(f"Expected {expected}. Found: {found}. What to do: {remedy}.")
