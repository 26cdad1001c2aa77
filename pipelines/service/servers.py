"""Starts the servers of a tf.data service in this process."""

import socket
from typing import Any

import grpc
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.service.guard import EVERYWHERE, Guard
from tfopt.pipelines.service.peer import LostError, Peer
from tfopt.pipelines.service.relay import DEADLINE_SECONDS

_DISPATCHER_TIMEOUT_MS = 60_000  # then a worker that is cut off from the dispatcher says so to who reads from it


class Servers:
    """A dispatcher, or none, and workers.

    Args:
        guard: Guards their ports.
        bind: The address that they are reached by.
        host: What other machines call this one; "" for the address, or for the host's name where that is every one.
        dispatcher: "host:port" of one elsewhere; "" starts one here.
        port: The dispatcher's port, 0 for any.
        worker_port: The first worker's port, those of the others follow; 0 for any.
        workers: How many workers to start.
        data_folder: Where the dispatcher keeps its state; "" keeps it in memory.

    Attributes:
        dispatcher: The dispatcher's address.
        workers: Those of the workers.

    Raises:
        PipelineError: A port is taken, the folder cannot be written, or the dispatcher does not answer.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        bind: str,
        host: str,
        dispatcher: str,
        port: int,
        worker_port: int,
        workers: int,
        data_folder: str,
    ) -> None:
        service = tf.data.experimental.service
        host = host or (socket.gethostname() if bind in EVERYWHERE else bind)
        host = f"[{host}]" if ":" in host else host
        self.workers: list[str] = []
        self._servers: list[Any] = []
        self.dispatcher = dispatcher
        if dispatcher:
            _expect_dispatcher(dispatcher)
        else:
            port = guard.port(port)
            self.dispatcher = f"{host}:{port}"
            config = service.DispatcherConfig(
                port=port, protocol="grpc", work_dir=data_folder, fault_tolerant_mode=bool(data_folder)
            )
            self._start("dispatcher", self.dispatcher, service.DispatchServer, config)
        for number in range(workers):
            own = guard.port(worker_port + number if worker_port else 0)
            self.workers.append(f"{host}:{own}")
            config = service.WorkerConfig(
                dispatcher_address=self.dispatcher,
                worker_address=self.workers[-1],
                data_transfer_address=self.workers[-1],
                port=own,
                protocol="grpc",
                dispatcher_timeout_ms=_DISPATCHER_TIMEOUT_MS,
            )
            self._start("worker", self.workers[-1], service.WorkerServer, config)

    def __str__(self) -> str:
        return f"tf.data service at grpc://{self.dispatcher}" + "".join(f"\n  worker {each}" for each in self.workers)

    def _start(self, kind: str, address: str, server: Any, config: Any) -> None:
        try:
            self._servers.append(server(config))
        except (tf.errors.OpError, RuntimeError) as error:
            raise PipelineError(
                f"Expected to start a {kind} of the tf.data service at {address}. Found: {error}. What to do: "
                "check the addresses, that a dispatcher runs, and that the data folder can be written."
            ) from error


def _expect_dispatcher(address: str) -> None:
    """Expects an answer: without one TensorFlow's worker tries for an hour, and cannot be interrupted."""
    try:
        Peer(address, "dispatcher").ping(DEADLINE_SECONDS)
    except (LostError, grpc.RpcError) as error:
        found = error.found if isinstance(error, LostError) else error.details()
        raise PipelineError(
            f"Expected a dispatcher of a tf.data service at {address}. Found: {found}. What to do: start it first, "
            "with `--workers 0` on its machine, or correct `--dispatcher`."
        ) from error
