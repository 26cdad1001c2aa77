"""gRPC calls to a dispatcher or worker of a tf.data service, and the protobuf fields that tfopt reads of the answers.

TensorFlow ships no Python classes for these messages, so they are read by field number, which protobuf never changes.
"""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import empty_pb2, unknown_fields

from tfopt.errors import PipelineError

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
# A restarted server is found at once; gRPC's own back-off reaches two minutes.
_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100))
_GET_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
_GET_TASKS = "/tensorflow.data.WorkerService/GetWorkerTasks"
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


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
        self._losses = 0
        self._connected = threading.Event()
        self._name = f"the {kind} of the tf.data service at {address}"
        self._ping = _GET_WORKERS if kind == "dispatcher" else _GET_TASKS
        self._channel = grpc.insecure_channel(address, options=UNLIMITED + _RECONNECT)
        self._channel.subscribe(self._on_change)

    def call(self, method: str, request: bytes, deadline_seconds: float) -> bytes:
        """Returns the server's answer; raises ServerLostError if there is none, and RpcError if it is an error."""
        try:
            answer: bytes = self._channel.unary_unary(method)(request, timeout=deadline_seconds)
        except grpc.RpcError as error:
            if error.code() not in _AWAY:
                raise
            silent = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            found = f"no answer in {deadline_seconds:g} s" if silent else f"nobody there ({error.details()})"
            raise self.lost(found) from error
        return answer

    def ping(self, deadline_seconds: float) -> bytes:
        """Makes a small call and returns the answer; raises as `call` does."""
        return self.call(self._ping, b"", deadline_seconds)

    def connection(self, deadline_seconds: float) -> int:
        """Returns the number of the connection; call it after `call`, which connects.

        A server restarted at the same address answers as if nothing had happened; only this number tells.
        """
        if not self._connected.wait(deadline_seconds):
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


def worker_addresses(answer: bytes) -> list[str]:
    """Returns the workers' addresses in a `GetWorkersResponse`."""
    return [_address(value) for number, value in _fields(answer) if number == 1 and isinstance(value, bytes)]


def client_number(request: bytes) -> int:
    """Returns which iterator sent a `ClientHeartbeatRequest` or `ReleaseIterationClientRequest`."""
    return next((value for number, value in _fields(request) if number == 1 and isinstance(value, int)), 0)


def heartbeat_workers(answer: bytes) -> tuple[list[str], bool]:
    """Returns the workers of an iteration and whether it has ended, from a `ClientHeartbeatResponse`."""
    return worker_addresses(answer), any(number == 2 and value == 1 for number, value in _fields(answer))


def _address(worker: bytes) -> str:
    """Returns the first field of a `WorkerInfo` or `TaskInfo`."""
    return next(value.decode() for number, value in _fields(worker) if number == 1 and isinstance(value, bytes))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of each field: to an empty message all of them are unknown."""
    for field in unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message)):
        yield field.field_number, field.data
