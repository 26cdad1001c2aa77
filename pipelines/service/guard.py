"""Keeps TensorFlow's servers to one address of the machine: they can only listen on all of them."""

import ipaddress
import socket
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from tfopt.errors import PipelineError

EVERYWHERE = ("0.0.0.0", "::")
_IPV4_TABLE, _IPV6_TABLE = Path("/proc/net/fib_trie"), Path("/proc/net/if_inet6")


class Guard:
    """Turns away whoever connects to a guarded port by another address of the machine than the given one.

    The kernel hands a connection to the socket that is bound to the very address before one that is bound to all. So
    one that answers nothing is bound to each of the others.

    Args:
        address: Where servers may be reached; 127.0.0.1 stands for the whole loopback, 0.0.0.0 for everywhere.
    """

    def __init__(self, address: str) -> None:
        self._open = ipaddress.ip_address(address)
        self._ports: list[int] = []
        self._sockets: dict[tuple[str, int, int], socket.socket] = {}

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for held in self._sockets.values():
            held.close()

    def port(self, wanted: int) -> int:
        """Returns a port that a server may now listen on, and guards it.

        Args:
            wanted: The port, 0 for any that is free.

        Raises:
            PipelineError: It is taken. TensorFlow would share it with another server of the same user in silence.
        """
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                probe.bind(("", wanted))
            except OSError as error:
                raise PipelineError(
                    f"Expected to listen on port {wanted}. Found: {error.strerror}. What to do: stop what listens "
                    f"there (`ss -ltnp 'sport = :{wanted}'` names it), or pass another port."
                ) from error
            port: int = probe.getsockname()[1]
        self._ports.append(port)
        self.refresh()
        return port

    def refresh(self) -> None:
        """Guards addresses that the machine has got since, and turns away who has connected. Call it now and then."""
        if str(self._open) in EVERYWHERE:
            return
        for address, scope in _addresses():
            for port in self._ports:
                if not self._is_open(address) and (address, scope, port) not in self._sockets:
                    self._sockets[address, scope, port] = _listening(address, scope, port)
        for held in self._sockets.values():
            with suppress(BlockingIOError):
                while True:
                    held.accept()[0].close()

    def _is_open(self, address: str) -> bool:
        ip = ipaddress.ip_address(address)
        return ip == self._open or (ip.is_loopback and self._open.is_loopback)


def _listening(address: str, scope: int, port: int) -> socket.socket:
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC's own, beside which it is
    held.setblocking(False)
    held.bind((address, port, 0, scope) if ":" in address else (address, port))
    held.listen()
    return held


def _addresses() -> set[tuple[str, int]]:
    """The addresses of this machine, with the number of the interface for IPv6."""
    try:
        lines = _IPV4_TABLE.read_text().splitlines()
        # "|-- 192.0.2.1", and below it "/32 host LOCAL".
        pairs = pairwise(lines)
        found = {(line.split()[-1], 0) for line, below in pairs if below.strip().startswith("/32 host LOCAL")}
        six = _IPV6_TABLE.read_text().splitlines() if _IPV6_TABLE.exists() else []
    except OSError as error:
        raise PipelineError(
            f"Expected to read the machine's addresses in {_IPV4_TABLE}, to listen on one of them alone. Found: "
            f"{error.strerror}. What to do: pass --bind 0.0.0.0, behind a firewall."
        ) from error
    for line in six:
        digits, interface = line.split()[:2]
        found.add((str(ipaddress.IPv6Address(int(digits, 16))), int(interface, 16)))
    return found
