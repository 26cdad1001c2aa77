"""Stands between TensorFlow's client and the dispatcher of a tf.data service, and fails calls once a server is lost.

TensorFlow's client waits forever for a dead worker or dispatcher, inside an operation that nothing in `model.fit` can
interrupt. Only an error in answer to its heartbeat, sent to the dispatcher each second, makes it give up. So its
dispatcher is this relay, in the same process. Elements do not pass through it; they come straight from the workers.

TensorFlow ships no Python classes for the messages, so they are read by field number, which protobuf never changes.
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
from google.protobuf import empty_pb2, unknown_fields

from tfopt.errors import PipelineError

DEADLINE_SECONDS = 60.0  # a busy server answers in milliseconds: its work runs in other threads
_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
# A restarted server is found at once; gRPC's own back-off reaches two minutes.
_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100))
_PINGS = {
    "dispatcher": "/tensorflow.data.DispatcherService/GetWorkers",
    "worker": "/tensorflow.data.WorkerService/GetWorkerTasks",
}
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_THREADS = 32  # a heartbeat occupies one for as long as a server does not answer
# The client reconnects until it has seen the error, within a second: connections are dropped for three.
_DROPS, _PAUSE_SECONDS = 6, 0.5


class ServerLostError(PipelineError):
    """A server of a tf.data service does not answer, or was restarted."""

    def __init__(self, name: str, found: str) -> None:
        self.found = found  # in place of an answer
        super().__init__(
            f"Expected {name} to answer as long as the pipeline is read. Found: {found}. Examples it held are lost, so "
            "the epoch cannot be completed. What to do: look at its log, start it again with `python -m "
            "tfopt.pipelines.serve` at the same address, and resume from the last checkpoint."
        )


class Peer:
    """A dispatcher or worker at "host:port", called with a deadline; notices when it was restarted."""

    def __init__(self, address: str, kind: str) -> None:
        self.address = address
        self._losses = 0
        self._connected = threading.Event()
        self._name = f"the {kind} of the tf.data service at {address}"
        self._ping = _PINGS[kind]
        self._channel = grpc.insecure_channel(address, options=_UNLIMITED + _RECONNECT)
        self._channel.subscribe(self._on_change)

    def call(self, method: str, request: bytes) -> bytes:
        """Returns the server's answer; raises ServerLostError if there is none, and RpcError if it is an error."""
        try:
            answer: bytes = self._channel.unary_unary(method)(request, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            if error.code() not in _AWAY:
                raise
            silent = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            found = f"no answer in {DEADLINE_SECONDS:g} s" if silent else f"nobody there ({error.details()})"
            raise self.lost(found) from error
        return answer

    def ping(self) -> bytes:
        """Makes a small call and returns the answer; raises as `call` does."""
        return self.call(self._ping, b"")

    def connection(self) -> int:
        """Returns the number of the connection; call it after `call`, which connects.

        A server restarted at the same address answers as if nothing had happened; only this number tells.
        """
        if not self._connected.wait(DEADLINE_SECONDS):
            raise self.lost("the connection broke")
        return self._losses

    def lost(self, found: str) -> ServerLostError:
        """Returns the error for what was found in place of an answer."""
        return ServerLostError(self._name, found)

    def _on_change(self, state: Any) -> None:
        if state == grpc.ChannelConnectivity.READY:
            self._connected.set()
        elif self._connected.is_set():
            self._connected.clear()
            self._losses += 1


def find_workers(dispatcher: Peer, argument: str) -> list[str]:
    """Returns the addresses of a dispatcher's workers; `argument` gave its own, for the error if nothing answers."""
    try:
        return _worker_addresses(dispatcher.ping())
    except (ServerLostError, grpc.RpcError) as error:
        found = error.found if isinstance(error, ServerLostError) else error.details()
        raise PipelineError(
            f"Expected a dispatcher of a tf.data service at {dispatcher.address}. Found: {found}. What to do: "
            f"start it first, with `python -m tfopt.pipelines.serve` on its machine, or correct `{argument}`."
        ) from error


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
        self.dispatcher = Peer(dispatcher, "dispatcher")
        self._workers: dict[str, Peer] = {}
        self._iterators: dict[int, _Iterator] = {}  # by the dispatcher's numbers for them
        self._drops: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pings = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-ping")
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-relay")
        self._server = grpc.server(pool, handlers=[self], options=_UNLIMITED)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        # Iterators alive at exit would wait for an answer that no Python thread can give.
        atexit.register(self._server.stop, None)

    def service(self, handler_call_details: Any) -> Any:
        """Returns the handler of a call; gRPC calls this."""
        method = handler_call_details.method

        def answer(request: bytes, context: Any) -> bytes:
            try:
                if method.endswith("/ClientHeartbeat"):
                    return self._heartbeat(method, request)
                if method.endswith("/ReleaseIterationClient"):
                    self._iterators.pop(_client_number(request), None)
                if method.endswith("/GetOrCreateIteration"):
                    self._wait_for_drops()
                return self.dispatcher.call(method, request)
            except ServerLostError as error:
                # After UNAVAILABLE, ABORTED or CANCELLED TensorFlow's client would retry forever.
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)

    def _heartbeat(self, method: str, request: bytes) -> bytes:
        iterator = self._iterators.setdefault(_client_number(request), _Iterator())
        try:
            return self._checked(iterator, self.dispatcher.call(method, request))
        except ServerLostError:
            if not iterator.failed:  # heartbeats go on after an error
                iterator.failed = True
                self._drops += [drop_connections(address) for address in list(self._workers)]
            raise

    def _checked(self, iterator: _Iterator, answer: bytes) -> bytes:
        """Returns the answer to a heartbeat if every server the iterator depends on is still the same."""
        workers, finished = _worker_addresses(answer), 1 in _values(answer, 2)
        with self._lock:
            addresses = {*workers, *iterator.connections} - {""}
            self._workers |= {each: Peer(each, "worker") for each in addresses - self._workers.keys()}
            peers = {each: self._workers[each] for each in addresses}
        self._expect_same(iterator, "", self.dispatcher)
        if not peers and time.monotonic() - iterator.started > DEADLINE_SECONDS:
            raise self.dispatcher.lost(f"it has had no worker for {DEADLINE_SECONDS:g} s")
        # Any of them may hold elements of the iterator, even one whose share the dispatcher believes to be done.
        # They are asked once more at the end; after that they may go.
        asked = {} if iterator.finished else peers
        pings = {self._pings.submit(peer.ping): at for at, peer in asked.items()}
        for ping, address in pings.items():
            ping.result()
            self._expect_same(iterator, address, peers[address])
        iterator.finished = finished
        return answer

    def _expect_same(self, iterator: _Iterator, address: str, peer: Peer) -> None:
        connection = peer.connection()
        if iterator.connections.setdefault(address, connection) != connection:
            raise peer.lost("another process than before: it was started again")

    def _wait_for_drops(self) -> None:
        """Waits until the connections of failed iterators are dropped, or a new iterator would lose its own."""
        while self._drops:
            self._drops[0].join()
            self._drops = [drop for drop in self._drops if drop.is_alive()]


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


def _worker_addresses(answer: bytes) -> list[str]:
    """Returns the workers' addresses in a `GetWorkersResponse` or `ClientHeartbeatResponse`."""
    return [_values(worker, 1)[0].decode() for worker in _values(answer, 1)]


def _client_number(request: bytes) -> int:
    """Returns which iterator sent a `ClientHeartbeatRequest` or `ReleaseIterationClientRequest`."""
    return next(iter(_values(request, 1)), 0)


def _values(message: bytes, number: int) -> list[Any]:
    """Returns the values of a field: to an empty message all fields are unknown."""
    fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    return [field.data for field in fields if field.field_number == number]
