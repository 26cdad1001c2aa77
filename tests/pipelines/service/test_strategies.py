"""Under a strategy: two replicas share the examples, and several processes are refused."""

import json
import socket
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "support" / "service_strategies.py")


def test_each_example_comes_to_one_replica_once_an_epoch(servers, service, tmp_path):
    process, output = servers.run(service, str(tmp_path / "seen.json"), script=SCRIPT)
    assert servers.wait(process) == 0, output.read_text()
    epochs = json.loads((tmp_path / "seen.json").read_text())
    assert len(epochs) == 2
    for parts in epochs:
        assert len(parts) == 2 * 13
        assert sorted(example for part in parts for example in part) == list(range(203))


def test_several_processes_are_refused(servers):
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        workers = [f"127.0.0.1:{free.getsockname()[1]}" for free in (first, second)]
    started = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = {"TF_CONFIG": json.dumps(config)}
        started.append(servers.run("grpc://127.0.0.1:9", script=SCRIPT, environ=environ))
    for process, output in started:
        assert servers.wait(process) == 0, output.read_text()
        assert "Expected a single process to train on a tf.data service. Found: a cluster of 2" in output.read_text()
