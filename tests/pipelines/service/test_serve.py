"""The command, as a process."""

import os
import re
import signal
import socket

import pytest

from tfopt.pipelines.serve import PortFilter, _addresses


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_stops_on_a_signal_and_frees_its_port(servers, number, code):
    process, (at, worker) = servers.serve("--port", "0")
    assert at.startswith("127.0.0.1:")
    assert worker.startswith("127.0.0.1:")
    os.kill(process, number)
    assert servers.wait(process) == code
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(at.split(":")[1])), timeout=5)


@pytest.mark.slow
def test_a_taken_port_is_named(servers):
    _, (at, _) = servers.serve("--port", "0")
    port = at.split(":")[1]
    process, output = servers.run("--port", port)
    assert servers.wait(process) == 3
    assert f"Expected to listen on port {port}. Found: Address already in use. What to do" in output.read_text()


@pytest.mark.slow
def test_a_worker_without_a_dispatcher_gives_up(servers):
    process, output = servers.run("--dispatcher", "127.0.0.1:9")
    assert servers.wait(process) == 3
    assert "Expected a dispatcher of a tf.data service at 127.0.0.1:9. Found: nobody there" in output.read_text()


@pytest.mark.slow
def test_ports_can_be_chosen(servers):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _, addresses = servers.serve("--port", "0", "--workers", "2", "--worker-port", str(port))
    assert addresses[1:] == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]


def reachable(address, port):
    """Whether a server of gRPC greets there."""
    with socket.create_connection((address, port), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        try:
            return bool(connection.recv(1))
        except ConnectionError:
            return False


OTHERS = [address for address, scope in _addresses() if ":" not in address and not address.startswith("127.")]


@pytest.mark.slow
@pytest.mark.skipif(not OTHERS, reason="needs an address beside the loopback")
def test_only_the_address_that_was_given_is_reachable(servers):
    _, (at, worker) = servers.serve("--port", "0")
    for port in (int(each.split(":")[1]) for each in (at, worker)):
        assert reachable("127.0.0.1", port)
        assert not reachable(OTHERS[0], port)
    _, (at, _) = servers.serve("--port", "0", "--bind", "0.0.0.0")
    assert reachable(OTHERS[0], int(at.split(":")[1]))


def test_the_filter_gives_its_ports_back():
    with PortFilter("127.0.0.1") as ports:
        port = ports.reserve(0)
    with PortFilter("127.0.0.1") as ports:
        assert ports.reserve(port) == port


def test_usage(servers):
    process, output = servers.run("--port", "70000")
    assert servers.wait(process) == 2
    assert "expected a port from 0 to 65535, found '70000'" in output.read_text()


def test_a_data_folder_that_cannot_be_written_is_named(servers, tmp_path):
    (tmp_path / "file").touch()
    process, output = servers.run("--port", "0", "--data-folder", str(tmp_path / "file" / "state"))
    assert servers.wait(process) == 3
    assert re.search("Expected to start a dispatcher .*Found: .*/file.*What to do", output.read_text())
