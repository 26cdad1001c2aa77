"""Stands between TensorFlow's client and the dispatcher of a tf.data service, and fails calls once a server is lost.

TensorFlow's client waits forever for a dead worker or dispatcher, inside an operation that nothing in `model.fit` can
interrupt. Only an error in answer to its heartbeat, sent to the dispatcher each second, makes it give up. So its
dispatcher is this relay, in the same process. Elements do not pass through it; they come straight from the workers.
"""

import atexit
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc

from tfopt.errors import PipelineError
from tfopt.pipelines.service.rpc import (
    UNLIMITED,
    Peer,
    ServerLostError,
    client_number,
    heartbeat_workers,
    worker_addresses,
)

DEADLINE_SECONDS = 60.0  # a busy server answers in milliseconds: its work runs in other threads
_THREADS = 32  # a heartbeat occupies one for as long as a server does not answer
# The client reconnects until it has seen the error, within a second: connections are dropped for three.
_DROPS, _PAUSE_SECONDS = 6, 0.5


@cache
def relay_to(address: str) -> "Relay":
    """Returns this process' relay to a dispatcher; it starts on the first call and lives as long as the process."""
    return Relay(address)


@dataclass(slots=True)
class _Iterator:
    """A running iterator and the connections it depends on."""

    connections: dict[str, int] = field(default_factory=dict)  # number of the connection, by address
    started: float = field(default_factory=time.monotonic)
    failed: bool = False
    finished: bool = False


class Relay(grpc.GenericRpcHandler):
    """A stand-in for a dispatcher, listening at `address` on 127.0.0.1.

    A tf.data service gives each element to one worker, once. A worker that is lost or restarted takes its elements with
    it, so iterators reading from it fail with `tf.errors.DataLossError`. Later ones work.
    """

    def __init__(self, dispatcher: str) -> None:
        self._at = dispatcher
        self._dispatcher = Peer(dispatcher, "dispatcher")
        self._workers: dict[str, Peer] = {}
        self._iterators: dict[int, _Iterator] = {}  # by the dispatcher's numbers for them
        self._drops: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pings = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-ping")
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-relay")
        self._server = grpc.server(pool, handlers=[self], options=UNLIMITED)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        # Iterators alive at exit would wait for an answer that no Python thread can give.
        atexit.register(self._server.stop, None)

    def workers(self) -> list[str]:
        """Returns the addresses of the registered workers."""
        try:
            return worker_addresses(self._dispatcher.ping(DEADLINE_SECONDS))
        except (ServerLostError, grpc.RpcError) as error:
            found = error.found if isinstance(error, ServerLostError) else error.details()
            raise PipelineError(
                f"Expected a tf.data service at grpc://{self._at}. Found: {found}. What to do: start one there with "
                "`python -m tfopt.pipelines.serve`, or correct `service`."
            ) from error

    def service(self, handler_call_details: Any) -> Any:
        """Returns the handler of a call; gRPC calls this."""
        method = handler_call_details.method

        def answer(request: bytes, context: Any) -> bytes:
            try:
                if method.endswith("/ClientHeartbeat"):
                    return self._heartbeat(method, request)
                if method.endswith("/ReleaseIterationClient"):
                    self._iterators.pop(client_number(request), None)
                if method.endswith("/GetOrCreateIteration"):
                    self._wait_for_drops()
                return self._call(method, request)
            except ServerLostError as error:
                # After UNAVAILABLE, ABORTED or CANCELLED TensorFlow's client would retry forever.
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)

    def _call(self, method: str, request: bytes) -> bytes:
        return self._dispatcher.call(method, request, DEADLINE_SECONDS)

    def _heartbeat(self, method: str, request: bytes) -> bytes:
        iterator = self._iterators.setdefault(client_number(request), _Iterator())
        try:
            return self._checked(iterator, self._call(method, request))
        except ServerLostError:
            if not iterator.failed:  # heartbeats go on after an error
                iterator.failed = True
                self._drops += [drop_connections(address) for address in list(self._workers)]
            raise

    def _checked(self, iterator: _Iterator, answer: bytes) -> bytes:
        """Returns the answer to a heartbeat if every server the iterator depends on is still the same."""
        workers, finished = heartbeat_workers(answer)
        with self._lock:
            peers = {address: self._worker(address) for address in {*workers, *iterator.connections} - {""}}
        self._expect_same(iterator, "", self._dispatcher)
        if not peers and time.monotonic() - iterator.started > DEADLINE_SECONDS:
            raise self._dispatcher.lost(f"it has had no worker for {DEADLINE_SECONDS:g} s")
        # Any of them may hold elements of the iterator, even one whose share the dispatcher believes to be done.
        # They are asked once more at the end; after that they may go.
        asked = {} if iterator.finished else peers
        pings = {self._pings.submit(peer.ping, DEADLINE_SECONDS): at for at, peer in asked.items()}
        for ping, address in pings.items():
            ping.result()
            self._expect_same(iterator, address, peers[address])
        iterator.finished = finished
        return answer

    def _expect_same(self, iterator: _Iterator, address: str, peer: Peer) -> None:
        connection = peer.connection(DEADLINE_SECONDS)
        if iterator.connections.setdefault(address, connection) != connection:
            raise peer.lost("another process than before: it was started again")

    def _wait_for_drops(self) -> None:
        """Waits until the connections of failed iterators are dropped, or a new iterator would lose its own."""
        while self._drops:
            self._drops[0].join()
            self._drops = [drop for drop in self._drops if drop.is_alive()]

    def _worker(self, address: str) -> Peer:
        if address not in self._workers:
            self._workers[address] = Peer(address, "worker")
        return self._workers[address]


def drop_connections(address: str) -> threading.Thread:
    """Closes this process' connections to "host:port" for three seconds, in the thread that it returns.

    Deleting a failed iterator waits for the element it last asked for: forever, if the worker is stopped or has lost
    the dispatcher.
    """
    thread = threading.Thread(target=_drop, args=(address,), name="tfopt-service-drop", daemon=True)
    thread.start()
    return thread


def _drop(address: str) -> None:
    host, port = address.rsplit(":", 1)
    with suppress(OSError):
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        peers = {(str(each[4][0]), int(port)) for each in found}
        for _ in range(_DROPS):
            for number in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # closed meanwhile, or not connected
                    if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                        _shut_down(int(number), peers)
            time.sleep(_PAUSE_SECONDS)


def _shut_down(number: int, peers: set[tuple[str, int]]) -> None:
    with socket.socket(fileno=os.dup(number)) as held:
        at = held.getpeername()
        inet = held.family in (socket.AF_INET, socket.AF_INET6)  # a Unix socket's peer is a string
        if inet and (at[0].removeprefix("::ffff:"), at[1]) in peers:
            held.shutdown(socket.SHUT_RDWR)
