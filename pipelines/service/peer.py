"""A dispatcher or a worker as seen from here: asked by a deadline, and watched for having been away."""

import threading
from typing import Any

import grpc

from tfopt.errors import PipelineError

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
# One that is back is found at once: gRPC would look for it again after up to two minutes.
_AGAIN = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100))
_GET_WORKERS = "/tensorflow.data.DispatcherService/GetWorkers"
_GET_TASKS = "/tensorflow.data.WorkerService/GetWorkerTasks"
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class LostError(PipelineError):
    """A server of a tf.data service does not answer, or is no longer the process that it was.

    Attributes:
        found: What was found in place of an answer.
    """

    def __init__(self, name: str, found: str) -> None:
        self.found = found
        super().__init__(
            f"Expected {name} to answer as long as the pipeline is read. Found: {found}. Examples that were with it "
            "are lost: the epoch cannot be completed. What to do: look at its log, start it again with `python -m "
            "tfopt.pipelines.serve` at the same address, and train on from the last checkpoint."
        )


class Peer:
    """A server of a tf.data service.

    Args:
        address: "host:port".
        kind: "dispatcher" or "worker".
    """

    def __init__(self, address: str, kind: str) -> None:
        self._losses = 0
        self._connected = threading.Event()
        self._name = f"the {kind} of the tf.data service at {address}"
        self._ping = _GET_WORKERS if kind == "dispatcher" else _GET_TASKS
        self._channel = grpc.insecure_channel(address, options=UNLIMITED + _AGAIN)
        self._channel.subscribe(self._on_change)

    def call(self, method: str, request: bytes, deadline_seconds: float) -> bytes:
        """Returns its answer.

        Raises:
            LostError: There is none by the deadline, or nobody listens there.
            grpc.RpcError: It answers with an error.
        """
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
        """Asks for something small and returns the answer; raises as `call` does."""
        return self.call(self._ping, b"", deadline_seconds)

    def connection(self, deadline_seconds: float) -> int:
        """Returns the number of the connection. Call it after `call`, which connects.

        A server that was started again at the same address answers as if nothing had happened; only this tells.

        Raises:
            LostError: There is none any more.
        """
        if not self._connected.wait(deadline_seconds):
            raise self.lost("the connection broke")
        return self._losses

    def lost(self, found: str) -> LostError:
        """Returns the error for what was found in place of an answer."""
        return LostError(self._name, found)

    def _on_change(self, state: Any) -> None:
        if state == grpc.ChannelConnectivity.READY:
            self._connected.set()
        elif self._connected.is_set():
            self._connected.clear()
            self._losses += 1
