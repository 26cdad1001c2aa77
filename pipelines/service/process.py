"""Starts the relay in a process of its own, and closes connections of this process when the relay asks for it.

In threads of this process it would wait for itself: Python collects garbage in whichever thread allocates next, and
deleting an iterator, which that may entail, waits for an answer of the relay.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

from tfopt.errors import PipelineError
from tfopt.pipelines.service import relay
from tfopt.processes import python_path

_COMMAND = "from tfopt.pipelines.service.relay import main; main()"
# Of the threads that close connections, one may be deleting an iterator that waits for a connection to be closed.
# Python never collects garbage in two threads at a time, so the other one goes on.
_CLOSERS = 2
_PAUSE_SECONDS = 0.5


@cache
def relay_to(dispatcher: str) -> str:
    """Returns the address of this process' relay to a dispatcher; its process starts on the first call.

    Raises:
        PipelineError: If the relay does not start.
    """
    # Bound until this process ends, so that a relay that is killed can be replaced at the same port.
    port_holder = socket.socket()
    port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port_holder.bind(("127.0.0.1", 0))
    port: int = port_holder.getsockname()[1]
    port_holder.detach()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(_CLOSERS)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    process = subprocess.Popen(
        # -P: no file of the working directory may pass for a module.
        [sys.executable, "-P", "-c", _COMMAND, dispatcher, str(port), str(relay.DEADLINE_SECONDS), *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": python_path()},
        pass_fds=numbers,
        start_new_session=True,  # Ctrl-C is meant for this process
    )
    for _, theirs in pairs:
        theirs.close()
    if not pairs[0][0].recv(1, socket.MSG_PEEK):
        raise PipelineError(
            f"Expected tfopt's relay to the tf.data service to start. Found: it ended with code {process.wait()}. What "
            "to do: look for its own message above."
        )
    for ours, _ in pairs:
        arguments = ours, process
        threading.Thread(target=_close_on_request, args=arguments, name="tfopt-service-closer", daemon=True).start()
    return f"127.0.0.1:{port}"


def _close_on_request(channel: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Closes connections until each request is over, and answers it then. Returns once the relay has ended."""
    requests: dict[bytes, tuple[float, Any]] = {}  # the monotonic time of their end, and the peers
    with suppress(ConnectionError):
        while True:
            channel.settimeout(_PAUSE_SECONDS if requests else None)
            with suppress(TimeoutError):
                request = channel.recv(relay.MESSAGE_BYTES)
                if not request:
                    break
                requests[request] = json.loads(request)
            close_connections({(host, port) for _, peers in requests.values() for host, port in peers})
            for over in [each for each, (until, _) in requests.items() if until < time.monotonic()]:
                del requests[over]
                channel.send(over)
    process.wait()


def close_connections(peers: set[tuple[str, int]]) -> None:
    """Closes this process' connections to the given addresses and ports.

    Deleting a failed iterator waits for the element it last asked for: forever, if the worker is stopped or has lost
    the dispatcher.
    """
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                _shut_down(int(number), peers)


def _shut_down(number: int, peers: set[tuple[str, int]]) -> None:
    with socket.socket(fileno=os.dup(number)) as held:
        at = held.getpeername()
        inet = held.family in (socket.AF_INET, socket.AF_INET6)  # a Unix socket's peer is a string
        if inet and (at[0].removeprefix("::ffff:"), at[1]) in peers:
            held.shutdown(socket.SHUT_RDWR)
