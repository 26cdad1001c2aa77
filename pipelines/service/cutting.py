"""Ends this process's connections to a server that does not answer: TensorFlow's client waits for it to the last."""

import os
import socket
import threading
import time
from contextlib import suppress

_TIMES, _PAUSE_SECONDS = 6, 0.5  # the client connects again until it has heard of the error, within a second


def cut_connections(address: str) -> threading.Thread:
    """Ends all connections to an address for three seconds, in a thread of its own, which is returned.

    An iterator that failed is deleted at last, and its deletion waits for the element that it had asked for: of a
    worker that is stopped, or has lost the dispatcher, without end.

    Args:
        address: "host:port".
    """
    thread = threading.Thread(target=_cut, args=(address,), name="tfopt-service-cut", daemon=True)
    thread.start()
    return thread


def _cut(address: str) -> None:
    host, port = address.rsplit(":", 1)
    with suppress(OSError):
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        peers = {(str(each[4][0]), int(port)) for each in found}
        for _ in range(_TIMES):
            for number in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # closed in the meantime, or not connected
                    if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                        _cut_one(int(number), peers)
            time.sleep(_PAUSE_SECONDS)


def _cut_one(number: int, peers: set[tuple[str, int]]) -> None:
    with socket.socket(fileno=os.dup(number)) as held:
        at = held.getpeername()
        inet = held.family in (socket.AF_INET, socket.AF_INET6)  # a Unix socket's peer is a text
        if inet and (at[0].removeprefix("::ffff:"), at[1]) in peers:
            held.shutdown(socket.SHUT_RDWR)
