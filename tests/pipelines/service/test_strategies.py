"""Under a strategy, each example comes to one replica, of one process, once an epoch: what they saw is counted."""

import json
import math
import re
import socket
from pathlib import Path

import pytest
from part_sources import write_files

from tfopt.distribute.watchdog.watch import RESTART

SCRIPT = str(Path(__file__).parents[2] / "support" / "service_strategies.py")
ALL = list(range(203))
pytestmark = pytest.mark.slow  # real processes: a service and those that train


def processes(servers, *arguments):
    """Runs the script in two processes of a cluster; returns their exit codes and outputs."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        workers = [f"127.0.0.1:{free.getsockname()[1]}" for free in (first, second)]
    started = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        started.append(servers.run(*arguments, script=SCRIPT, environ={"TF_CONFIG": json.dumps(config)}))
    return [(servers.wait(process), output) for process, output in started]


def together(found, name):
    """What both processes saw in each epoch: the sizes of their batches, and the examples."""
    for parts in zip(*(each[name]["epochs"] for each in found), strict=True):
        sizes = [[len(batch) for batch in part] for part in parts]
        yield sizes, sorted(example for part in parts for batch in part for example in batch)


@pytest.fixture(scope="module")
def ended(servers, service, tmp_path_factory):
    """Two processes that trained on one service, and then on one whose worker was killed: what they left behind."""
    folder = tmp_path_factory.mktemp("trained")
    _, (at, _) = servers.serve("--port", "0")
    doomed, (_, killed) = servers.serve("--dispatcher", at)
    write_files(folder, (60, 11, 47, 85))
    return processes(servers, service, str(folder), f"grpc://{at}", str(doomed)), folder, killed


@pytest.fixture(scope="module")
def trained(ended):
    """What the two processes saw."""
    outputs, folder, _ = ended
    for _, output in outputs:
        assert "Traceback" not in output.read_text()
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(2)]


def test_each_example_comes_to_one_replica_once_an_epoch(servers, service, tmp_path):
    process, output = servers.run(service, str(tmp_path), script=SCRIPT)
    assert servers.wait(process) == 0, output.read_text()
    found = json.loads((tmp_path / "0.json").read_text())
    for each in found.values():
        assert len(each["epochs"]) == 3
        for batches in each["epochs"]:
            assert len(batches) == 2 * 13
            assert sorted(example for batch in batches for example in batch) == ALL


@pytest.mark.parametrize(("name", "steps"), [("arrays", 13), ("records", 13)])
def test_each_example_comes_to_one_process_once_an_epoch(trained, name, steps):
    for sizes, examples in together(trained, name):
        assert examples == ALL
        assert [len(part) for part in sizes] == [steps, steps]
        assert max(map(max, sizes)) == 8


def test_full_batches_come_from_both_processes(trained):
    for sizes, examples in together(trained, "full batches"):
        assert sizes == [[8] * 12] * 2
        assert len(set(examples)) == 12 * 16


@pytest.mark.parametrize("name", ["arrays", "records", "full batches"])
def test_processes_take_the_same_steps_to_the_same_loss(trained, name):
    first, second = (each[name] for each in trained)
    assert first["loss"] == second["loss"]
    assert all(map(math.isfinite, first["loss"]))
    assert first["iterations"] == second["iterations"] == 3 * first["steps"]
    assert first["epochs"][0] != first["epochs"][1]


def test_the_plan_says_which_part_a_process_has(trained):
    for index, found in enumerate(trained):
        plan = found["arrays"]["plan"]
        assert f"this process has part {index + 1} of 2, 8 examples of each batch" in plan
        assert f"read arrays {102 - index} examples" in plan
        assert "13 steps an epoch" in plan


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("uneven", "Found: 15. What to do: pass 14"),
        ("padded", "Found: 'pad'"),
        ("profiled", "profile_pipeline expects a plan of one process"),
        ("whole", "a source that can be divided among 2 processes.* Found: .*What to do"),
        ("outside", "inside the scope of the strategy of its 2 processes. Found: .*What to do"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(trained, name, found):
    for each in trained:
        assert re.search(found, each[name])


def test_a_worker_that_is_killed_ends_the_epoch_in_all_processes(ended):
    outputs, folder, worker = ended
    errors = []
    for index, (code, output) in enumerate(outputs):
        if code == 0:
            errors.append((folder / f"{index}.txt").read_text())
        else:  # the first one that has ended takes the other with it
            assert code == RESTART, output.read_text()
    assert all(errors)
    lost = f"Expected the worker of the tf.data service at {worker}"
    assert any(error.startswith("DataLossError") and lost in error for error in errors)
