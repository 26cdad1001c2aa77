"""Which process holds a port: real sockets of this process."""

import os
import socket

import psutil
import pytest

from tfopt.hardware import ports
from tfopt.hardware.ports import port_holder


def test_the_holder_of_a_port() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert port_holder(port) == f"{psutil.Process().name()} (process {os.getpid()})"
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert port_holder(client.getsockname()[1]) is None  # a client's end is no holder
    assert port_holder(port) is None


@pytest.mark.parametrize("error", [psutil.AccessDenied(), psutil.NoSuchProcess(1), PermissionError()])
def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(kind: str) -> None:
        raise error

    monkeypatch.setattr(ports.psutil, "net_connections", refuse)
    assert port_holder(80) is None
