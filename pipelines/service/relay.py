"""Stands between TensorFlow's client and the dispatcher of a tf.data service, and fails calls once a server is lost.

TensorFlow's client waits forever for a dead worker or dispatcher, inside an operation that nothing in `model.fit` can
interrupt. Only an error in answer to its heartbeat, sent to the dispatcher each second, makes it give up. So its
dispatcher is this relay, in a process of its own (process.py says why). Elements do not pass through it; they come
straight from the workers.

TensorFlow ships no Python classes for the messages, so they are read by field number, which protobuf never changes.
"""

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

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
_CLOSING_SECONDS = 3.0  # TensorFlow's client reconnects until it has seen the error, within a second
MESSAGE_BYTES = 2**16  # the longest message between the relay and the training process
_RESTARTED = (
    "Expected tfopt's relay to the tf.data service, a process of its own, to run as long as the pipeline is read. "
    "Found: it was killed, and another one has taken its place. The loss of a server may have gone unnoticed, so the "
    "epoch cannot be completed. What to do: see whether this machine runs out of memory, and resume from the last "
    "checkpoint."
)


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
    """A dispatcher or worker at "host:port", called with a deadline."""

    def __init__(self, address: str, kind: str) -> None:
        self._name = f"the {kind} of the tf.data service at {address}"
        self._ping = _PINGS[kind]
        self._channel = grpc.insecure_channel(address, options=_UNLIMITED + _RECONNECT)

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

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def lost(self, found: str) -> ServerLostError:
        """Returns the error for what was found in place of an answer."""
        return ServerLostError(self._name, found)


class WatchedPeer(Peer):
    """One that notices when it was restarted. It cannot be closed: gRPC's thread that watches would fail."""

    def __init__(self, address: str, kind: str) -> None:
        super().__init__(address, kind)
        self._losses = 0
        self._connected = threading.Event()
        self._channel.subscribe(self._on_change)

    def connection(self) -> int:
        """Returns the number of the connection; call it after `call`, which connects.

        A server restarted at the same address answers as if nothing had happened; only this number tells.
        """
        if not self._connected.wait(DEADLINE_SECONDS):
            raise self.lost("the connection broke")
        return self._losses

    def _on_change(self, state: Any) -> None:
        if state == grpc.ChannelConnectivity.READY:
            self._connected.set()
        elif self._connected.is_set():
            self._connected.clear()
            self._losses += 1


def find_workers(address: str, argument: str) -> list[str]:
    """Returns the addresses of a dispatcher's workers; `argument` gave its own, for the error if nothing answers."""
    dispatcher = Peer(address, "dispatcher")
    try:
        return _worker_addresses(dispatcher.ping())
    except (ServerLostError, grpc.RpcError) as error:
        found = error.found if isinstance(error, ServerLostError) else error.details()
        raise PipelineError(
            f"Expected a dispatcher of a tf.data service at {address}. Found: {found}. What to do: "
            f"start it first, with `python -m tfopt.pipelines.serve` on its machine, or correct `{argument}`."
        ) from error
    finally:
        dispatcher.close()


@dataclass(slots=True)
class _Iterator:
    """A running iterator and the connections it depends on."""

    known: bool = True  # whether this relay has seen it begin
    connections: dict[str, int] = field(default_factory=dict)  # number of the connection, by address
    started: float = field(default_factory=time.monotonic)
    error: PipelineError | None = None
    finished: bool = False


class Relay(grpc.GenericRpcHandler):
    """A stand-in for a dispatcher, listening at a port of 127.0.0.1.

    A tf.data service gives each element to one worker, once. A worker that is lost or restarted takes its elements with
    it, so iterators reading from it fail with `tf.errors.DataLossError`. Later ones work. `closers` are the sockets of
    those who close the training process' connections; a relay that `replaces` a killed one waits for what that asked.
    """

    def __init__(self, dispatcher: str, port: int, closers: Sequence[socket.socket], *, replaces: bool) -> None:
        self._dispatcher = WatchedPeer(dispatcher, "dispatcher")
        self._closers = closers
        self._workers: dict[str, WatchedPeer] = {}
        self._iterators: dict[int, _Iterator] = {}  # by the dispatcher's numbers for them
        self._lock = threading.Lock()
        self._closing: set[tuple[socket.socket, bytes]] = set()  # requests without an answer yet
        self._closed = threading.Condition()
        self._pings = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-ping")
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-relay")
        self._server = grpc.server(pool, handlers=[self], options=(*_UNLIMITED, ("grpc.so_reuseport", 0)))
        self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._close_connections([], _CLOSING_SECONDS if replaces else 0.0)  # which also says that the relay is there
        self._server.start()

    def run(self) -> None:
        """Returns once the training process has ended."""
        selector: Any = selectors.DefaultSelector()
        for closer in self._closers:
            selector.register(closer, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                answer = key.fileobj.recv(MESSAGE_BYTES)
                if not answer:
                    return
                with self._closed:
                    self._closing.discard((key.fileobj, answer))
                    self._closed.notify_all()

    def service(self, handler_call_details: Any) -> Any:
        """Returns the handler of a call; gRPC calls this."""
        method = handler_call_details.method

        def answer(request: bytes, context: Any) -> bytes:
            try:
                if method.endswith("/ClientHeartbeat"):
                    return self._heartbeat(method, request)
                if method.endswith("/ReleaseIterationClient"):
                    iterator = self._iterators.pop(_client_number(request), None)
                    if iterator is not None and iterator.error is not None:
                        self._pings.submit(self._dispatcher.call, method, request)
                        return b""  # without waiting for a dispatcher that may be lost
                if method.endswith("/GetOrCreateIteration"):
                    return self._begin(method, request)
                return self._dispatcher.call(method, request)
            except PipelineError as error:
                # After UNAVAILABLE, ABORTED or CANCELLED TensorFlow's client would retry forever.
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)

    def _begin(self, method: str, request: bytes) -> bytes:
        """Makes an iterator once the connections of failed ones are closed, or it would lose its own."""
        with self._closed:
            if not self._closed.wait_for(lambda: not self._closing, 2 * DEADLINE_SECONDS):
                raise self._dispatcher.lost("the connections of an iterator that failed are still open")
        answer = self._dispatcher.call(method, request)
        self._iterators[_client_number(answer)] = _Iterator()
        return answer

    def _heartbeat(self, method: str, request: bytes) -> bytes:
        iterator = self._iterators.setdefault(_client_number(request), _Iterator(known=False))
        if iterator.error is not None:  # heartbeats go on after an error
            raise iterator.error
        try:
            return self._checked(iterator, self._dispatcher.call(method, request))
        except PipelineError as error:
            iterator.error = error
            self._close_connections(list(self._workers), _CLOSING_SECONDS)
            raise

    def _checked(self, iterator: _Iterator, answer: bytes) -> bytes:
        """Returns the answer to a heartbeat if every server the iterator depends on is still the same."""
        workers, finished = _worker_addresses(answer), 1 in _values(answer, 2)
        with self._lock:
            addresses = {*workers, *iterator.connections} - {""}
            self._workers |= {each: WatchedPeer(each, "worker") for each in addresses - self._workers.keys()}
            peers = {each: self._workers[each] for each in addresses}
        if not iterator.known:
            raise PipelineError(_RESTARTED)
        self._expect_same(iterator, "", self._dispatcher)
        if not peers and time.monotonic() - iterator.started > DEADLINE_SECONDS:
            raise self._dispatcher.lost(f"it has had no worker for {DEADLINE_SECONDS:g} s")
        # Any of them may hold elements of the iterator, even one whose share the dispatcher believes to be done.
        # They are asked once more at the end; after that they may go.
        asked = {} if iterator.finished else peers
        pings = {self._pings.submit(peer.ping): at for at, peer in asked.items()}
        for ping, address in pings.items():
            ping.result()
            self._expect_same(iterator, address, peers[address])
        iterator.finished = finished
        return answer

    def _expect_same(self, iterator: _Iterator, address: str, peer: WatchedPeer) -> None:
        connection = peer.connection()
        if iterator.connections.setdefault(address, connection) != connection:
            raise peer.lost("another process than before: it was started again")

    def _close_connections(self, workers: Sequence[str], seconds: float) -> None:
        request = _close_request(workers, time.monotonic() + seconds)
        with self._closed:
            self._closing |= {(closer, request) for closer in self._closers}
        for closer in self._closers:
            closer.send(request)


def main() -> NoReturn:
    """Runs a relay for the training process that started this one, until that has ended."""
    dispatcher, port, deadline_seconds, *closers = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the training process
        signal.signal(number, signal.SIG_IGN)
    # A program that reads the training process's stderr to its end must not wait for this process, too.
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    # In a child, so that another one replaces it if it is killed: without an answer, TensorFlow's client would wait
    # forever.
    replaces = False
    while os.fork():
        _, status = os.wait()
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
        replaces = True
    global DEADLINE_SECONDS
    DEADLINE_SECONDS = float(deadline_seconds)
    Relay(dispatcher, int(port), [socket.socket(fileno=int(each)) for each in closers], replaces=replaces).run()
    os._exit(0)  # without waiting for answers of servers


def _close_request(workers: Sequence[str], until: float) -> bytes:
    """Asks for connections to be closed again and again; looking names up may take locks, so it is done here."""
    peers = []
    for worker in workers:
        host, port = worker.rsplit(":", 1)
        with suppress(OSError):
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            peers += [(each[4][0], int(port)) for each in found]
    return json.dumps([until, peers]).encode()


def _worker_addresses(answer: bytes) -> list[str]:
    """Returns the workers' addresses in a `GetWorkersResponse` or `ClientHeartbeatResponse`."""
    return [_values(worker, 1)[0].decode() for worker in _values(answer, 1)]


def _client_number(message: bytes) -> int:
    """Returns the iterator's number in a `GetOrCreateIterationResponse`, or a request to end it or of its heartbeat."""
    return next(iter(_values(message, 1)), 0)


def _values(message: bytes, number: int) -> list[Any]:
    """Returns the values of a field: to an empty message all fields are unknown."""
    fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    return [field.data for field in fields if field.field_number == number]
