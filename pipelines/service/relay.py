"""Passes a pipeline's calls on to the dispatcher of a tf.data service, and fails them where a server is lost.

TensorFlow's client waits without end for a worker or a dispatcher that died, inside an operation that nothing in
`model.fit` can interrupt. It gives up on one thing: a heartbeat to the dispatcher, one a second, that is answered with
an error. So its dispatcher is this relay, in the same process. Elements do not pass through; they come straight from
the workers.
"""

import atexit
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc

from tfopt.errors import PipelineError
from tfopt.pipelines.service.cutting import cut_connections
from tfopt.pipelines.service.messages import client_number, heartbeat_workers, worker_addresses
from tfopt.pipelines.service.peer import UNLIMITED, LostError, Peer

DEADLINE_SECONDS = 60.0  # a server that is busy answers in milliseconds: what it computes runs in other threads
_THREADS = 32  # a heartbeat waits in one of them, for as long as a server does not answer


@dataclass(slots=True)
class _Iterator:
    """What is known of an iterator: the numbers of the connections that it depends on, by address."""

    connections: dict[str, int] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    failed: bool = False
    finished: bool = False


@cache
def relay_to(address: str) -> "Relay":
    """Returns this process's relay to a dispatcher, started at the first call; it lives as long as the process."""
    return Relay(address)


class Relay(grpc.GenericRpcHandler):
    """A stand-in for a dispatcher, on 127.0.0.1.

    A tf.data service gives each element to one worker, once. A worker that is lost, or started again, takes with it
    what it had been given: the iterators that read from it fail with `tf.errors.DataLossError`. Later ones do not.

    Args:
        dispatcher: The dispatcher's address, "host:port".

    Attributes:
        address: Its own, for TensorFlow's client.
    """

    def __init__(self, dispatcher: str) -> None:
        self._at = dispatcher
        self._dispatcher = Peer(dispatcher, "dispatcher")
        self._workers: dict[str, Peer] = {}
        self._iterators: dict[int, _Iterator] = {}  # by the dispatcher's numbers for them
        self._cuts: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pings = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-ping")
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tfopt-service-relay")
        self._server = grpc.server(pool, handlers=[self], options=UNLIMITED)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        # Iterators that live until the process ends would wait for an answer that no Python thread gives any more.
        atexit.register(self._server.stop, None)

    def workers(self) -> list[str]:
        """Returns the addresses of the workers that have registered.

        Raises:
            PipelineError: The dispatcher does not answer.
        """
        try:
            return worker_addresses(self._dispatcher.ping(DEADLINE_SECONDS))
        except (LostError, grpc.RpcError) as error:
            found = error.found if isinstance(error, LostError) else error.details()
            raise PipelineError(
                f"Expected a tf.data service at grpc://{self._at}. Found: {found}. What to do: start one there with "
                "`python -m tfopt.pipelines.serve`, or correct `service`."
            ) from error

    def service(self, handler_call_details: Any) -> Any:
        """Returns the handler of a call, as gRPC asks for it."""
        method = handler_call_details.method

        def answer(request: bytes, context: Any) -> bytes:
            try:
                if method.endswith("/ClientHeartbeat"):
                    return self._heartbeat(method, request)
                if method.endswith("/ReleaseIterationClient"):
                    self._iterators.pop(client_number(request), None)
                if method.endswith("/GetOrCreateIteration"):
                    self._wait_for_cuts()
                return self._call(method, request)
            except LostError as error:
                # Not UNAVAILABLE, ABORTED or CANCELLED: after those TensorFlow's client tries again without end.
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
            return self._watched(iterator, self._call(method, request))
        except LostError:
            if not iterator.failed:  # heartbeats go on after an error
                iterator.failed = True
                self._cuts += [cut_connections(address) for address in list(self._workers)]
            raise

    def _watched(self, iterator: _Iterator, answer: bytes) -> bytes:
        """Returns the answer to a heartbeat if all that the iterator depends on is what it was."""
        workers, finished = heartbeat_workers(answer)
        with self._lock:
            peers = {address: self._worker(address) for address in {*workers, *iterator.connections} - {""}}
        self._expect_same(iterator, "", self._dispatcher)
        if not peers and time.monotonic() - iterator.started > DEADLINE_SECONDS:
            raise self._dispatcher.lost(f"it has had no worker for {DEADLINE_SECONDS:g} s")
        # Each may hold elements of the iterator, those too whose part in it the dispatcher holds to be over.
        # At the end they are asked once more; then they may go.
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

    def _wait_for_cuts(self) -> None:
        """Waits until the connections of iterators that failed are ended: those of a new one would be ended too."""
        while self._cuts:
            self._cuts[0].join()
            self._cuts = [cut for cut in self._cuts if cut.is_alive()]

    def _worker(self, address: str) -> Peer:
        if address not in self._workers:
            self._workers[address] = Peer(address, "worker")
        return self._workers[address]
