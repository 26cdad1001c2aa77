"""`python -m tfopt.pipelines.serve`: runs the servers of a tf.data service, on one machine or several."""

import argparse
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.service.relay import find_workers

_EXIT_ENVIRONMENT, _EXIT_INTERRUPTED = 3, 130
_POLL_SECONDS = 0.5  # between checks for signals and for new addresses of the machine
_HIGHEST_PORT = 65535
_DISPATCHER_TIMEOUT_MS = 60_000  # then a worker cut off from the dispatcher tells whoever reads from it
_IPV4_TABLE, _IPV6_TABLE = Path("/proc/net/fib_trie"), Path("/proc/net/if_inet6")
# Held until the process ends: deleting a server calls TensorFlow's `stop`, which may hang on one that has just begun.
# Nothing is lost: the dispatcher writes its state as it goes.
_RUNNING: list["Servers"] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the servers until a signal; returns 0 after SIGTERM, 130 after Ctrl-C, 3 if they cannot run."""
    chosen = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    try:
        with PortFilter(chosen.bind) as ports:
            _RUNNING.append(Servers(ports, chosen))
            sys.stdout.write(f"{_RUNNING[-1]}\n")
            sys.stdout.flush()
            while True:
                time.sleep(_POLL_SECONDS)
                ports.refresh()
    except SystemExit:
        return 0
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_ENVIRONMENT


class Servers:
    """A dispatcher, unless one runs elsewhere, and workers, as the command's arguments describe them."""

    def __init__(self, ports: "PortFilter", chosen: argparse.Namespace) -> None:
        service = tf.data.experimental.service
        host = chosen.host or (socket.gethostname() if chosen.bind.is_unspecified else str(chosen.bind))
        host = f"[{host}]" if ":" in host else host
        self._workers: list[str] = []
        self._servers: list[Any] = []
        self._dispatcher: str = chosen.dispatcher
        if chosen.dispatcher:
            # Without an answer TensorFlow's worker would retry for an hour, and no signal could end it.
            find_workers(chosen.dispatcher, "--dispatcher")
        else:
            port = ports.reserve(chosen.port)
            self._dispatcher = f"{host}:{port}"
            config = service.DispatcherConfig(
                port=port,
                protocol="grpc",
                work_dir=chosen.data_folder,
                fault_tolerant_mode=bool(chosen.data_folder),
            )
            self._start("dispatcher", self._dispatcher, service.DispatchServer, config)
        for number in range(chosen.workers):
            port = ports.reserve(chosen.worker_port + number if chosen.worker_port else 0)
            self._workers.append(f"{host}:{port}")
            config = service.WorkerConfig(
                dispatcher_address=self._dispatcher,
                worker_address=self._workers[-1],
                data_transfer_address=self._workers[-1],
                port=port,
                protocol="grpc",
                dispatcher_timeout_ms=_DISPATCHER_TIMEOUT_MS,
            )
            self._start("worker", self._workers[-1], service.WorkerServer, config)

    def __str__(self) -> str:
        return f"tf.data service at grpc://{self._dispatcher}" + "".join(f"\n  worker {each}" for each in self._workers)

    def _start(self, kind: str, address: str, server: Any, config: Any) -> None:
        try:
            self._servers.append(server(config))
        except (tf.errors.OpError, RuntimeError) as error:
            raise PipelineError(
                f"Expected to start a {kind} of the tf.data service at {address}. Found: {error}. What to do: "
                "check the addresses, that a dispatcher runs, and that the data folder can be written."
            ) from error


class PortFilter:
    """Makes TensorFlow's servers reachable on one address; on their own they listen on all of the machine's.

    The kernel prefers the socket bound to the exact address of a connection over one bound to all addresses. So on each
    of the other addresses a socket is bound that accepts connections and closes them. 127.0.0.1 stands for the whole
    loopback, 0.0.0.0 for everywhere.
    """

    def __init__(self, address: Any) -> None:
        self._open = ipaddress.ip_address(address)
        self._ports: list[int] = []
        self._sockets: dict[tuple[str, int, int], socket.socket] = {}

    def __enter__(self) -> "PortFilter":
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._sockets.values():
            held.close()

    def reserve(self, wanted: int) -> int:
        """Returns a port for a server to listen on, filtered from now on; 0 stands for any free one.

        Refuses one that is taken: TensorFlow would silently share it with another server of the same user.
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
        """Filters addresses the machine has got since, and turns waiting connections away. Call it regularly."""
        if self._open.is_unspecified:
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
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does for its own on this port
    held.setblocking(False)
    held.bind((address, port, 0, scope) if ":" in address else (address, port))
    held.listen()
    return held


def _addresses() -> set[tuple[str, int]]:
    """Returns this machine's addresses, those of IPv6 with the number of their interface."""
    try:
        lines = _IPV4_TABLE.read_text().splitlines()
        # "|-- 192.0.2.1", and below it "/32 host LOCAL".
        pairs = pairwise(lines)
        found = {(line.split()[-1], 0) for line, below in pairs if below.strip().startswith("/32 host LOCAL")}
        six = _IPV6_TABLE.read_text().splitlines() if _IPV6_TABLE.exists() else []
    except OSError as error:
        raise PipelineError(
            f"Expected to read the machine's addresses in {_IPV4_TABLE}, to listen on only one of them. Found: "
            f"{error.strerror}. What to do: pass --bind 0.0.0.0, behind a firewall."
        ) from error
    for line in six:
        digits, interface = line.split()[:2]
        found.add((str(ipaddress.IPv6Address(int(digits, 16))), int(interface, 16)))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfopt.pipelines.serve",
        description="Runs a dispatcher and workers of a tf.data service, which prepare the input of trainings: "
        "plan_pipeline(source, service='grpc://HOST:PORT'). Without arguments, both on this machine, for this machine "
        "only. Prints the addresses when ready, and runs until SIGTERM or Ctrl-C.",
        epilog="On several machines: `serve --bind 0.0.0.0 --workers 0` on one, `serve --bind 0.0.0.0 --dispatcher "
        "HOST:5050` on the others. Anyone who reaches the ports can run TensorFlow graphs and read files there: keep "
        "them behind a firewall. Exit codes: 0 stopped by SIGTERM, 2 wrong usage, 3 cannot run (a port is taken), "
        "130 Ctrl-C.",
    )
    add = parser.add_argument
    add("--dispatcher", default="", metavar="HOST:PORT", help="a dispatcher elsewhere; default: start one here")
    add("--port", type=_port, default=5050, help="the dispatcher's port, 0 for any (default: %(default)s)")
    add("--workers", type=_count, default=1, help="workers to start; one uses all cores (default: %(default)s)")
    add("--worker-port", type=_port, default=0, help="the first worker's port, others follow it (default: any)")
    add(
        "--bind",
        type=ipaddress.ip_address,
        default="127.0.0.1",
        help="0.0.0.0 for all addresses (default: %(default)s)",
    )
    add("--host", default="", help="this machine's name for others (default: its host name, or the --bind address)")
    add("--data-folder", default="", metavar="FOLDER", help="keeps the dispatcher's state across restarts")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to {_HIGHEST_PORT}, found {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of workers, found {text!r}")
    return int(text)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see _RUNNING
