"""The relay's process: nothing hangs, whatever ends it and whoever collects garbage."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from gone import gone

from tfopt.pipelines import build_pipeline
from tfopt.pipelines.service import process

SUPPORT = Path(__file__).parents[2] / "support"
ROWS = np.arange(50_000)
SCRIPT = """
import os, subprocess, sys, time
import numpy as np
from tfopt.pipelines import build_pipeline

batches = [iter(build_pipeline(np.arange(2000), batch_size=10, prefetch=2, service=sys.argv[1])) for _ in range(2)]
for each in batches:
    next(each)
parent = str(os.getpid())
for _ in range(2):
    listed = subprocess.run(["pgrep", "-f", "service.relay", "-P", parent], capture_output=True, text=True)
    parent = listed.stdout.strip()
    print(parent, flush=True)
"""


def test_connections_to_the_address_end_and_others_stay():
    here, there = socket.socketpair()  # of Unix, whose peers have no address and port
    with here, there, socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        with (
            socket.create_connection(server.getsockname(), timeout=10) as cut,
            socket.create_connection(other.getsockname(), timeout=10) as kept,
        ):
            process.close_connections({server.getsockname()})
            assert cut.recv(1) == b""
            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(b"x")
                assert kept.recv(1) == b"x"
        here.sendall(b"y")
        assert there.recv(1) == b"y"


@pytest.mark.slow
def test_garbage_may_hold_an_iterator(servers, service):
    script, output = servers.run(service, "0", script=str(SUPPORT / "service_collected.py"))
    assert servers.wait(script) == 0, output.read_text()


@pytest.mark.slow
def test_a_thread_that_closes_connections_may_collect_an_iterator_that_waits_for_it(servers):
    _, (at,) = servers.serve("--port", "0", "--workers", "0")
    worker, _ = servers.serve("--dispatcher", at)
    script, output = servers.run(f"grpc://{at}", str(worker), script=str(SUPPORT / "service_collected.py"))
    assert servers.wait(script) == 0, output.read_text()
    assert "tfopt-service-closer" in output.read_text()
    os.kill(worker, signal.SIGKILL)


def relays(parent=None):
    """For each relay of this process, the process that starts it, and the one it runs in."""
    command = ["pgrep", "-f", "service.relay", "-P", str(parent or os.getpid())]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return {int(each): relays(each) for each in listed}


@pytest.fixture
def own_relay(servers):
    """A service, and the two processes of the relay to it."""
    _, (at, _) = servers.serve("--port", "0")
    before = relays()
    process.relay_to(at)
    ((starter, (number,)),) = ((each, under) for each, under in relays().items() if each not in before)
    return f"grpc://{at}", starter, number


@pytest.mark.slow
def test_a_relay_that_is_killed_is_an_error_and_another_one_takes_its_place(own_relay):
    service, _, number = own_relay
    dataset = build_pipeline(ROWS, batch_size=10, shuffle=False, prefetch=0, service=service)
    batches = iter(dataset)
    next(batches)
    os.kill(number, signal.SIGKILL)
    with pytest.raises(tf.errors.DataLossError, match=r"Expected tfopt's relay .*Found: it was killed.*What to do"):
        list(batches)
    assert len(set(np.concatenate(list(dataset.take(20))).tolist())) == 200


@pytest.mark.slow
def test_the_process_that_starts_the_relay_may_be_killed(own_relay):
    service, starter, number = own_relay
    dataset = build_pipeline(ROWS[:1000], batch_size=20, service=service)
    os.kill(starter, signal.SIGKILL)
    assert len(list(dataset)) == 50
    assert Path(f"/proc/{number}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_all_processes_of_a_job_do_not_end_the_relay(own_relay, number):
    service, *relay = own_relay
    for each in relay:
        os.kill(each, number)
    assert len(list(build_pipeline(ROWS[:1000], batch_size=20, service=service))) == 50
    assert all(Path(f"/proc/{each}").exists() for each in relay)


@pytest.mark.slow
def test_the_relay_ends_once_its_process_is_killed(servers, service, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}os.kill(os.getpid(), 9)")
    number, output = servers.run(service, script=str(script))
    assert servers.wait(number) == -signal.SIGKILL
    relay = output.read_text().split()[-2:]
    assert all(map(gone, relay))


@pytest.mark.slow
def test_a_process_ends_though_iterators_are_alive(service, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}if os.fork() == 0:\n    os._exit(0)\nos.wait()\nsys.exit(7)")
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-W", "error::ResourceWarning", str(script), service]
    # Waits for all who hold the output.
    found = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert found.returncode == 7, found.stderr
    assert "Traceback" not in found.stderr
    assert "Exception" not in found.stderr
    assert all(map(gone, found.stdout.split()))
