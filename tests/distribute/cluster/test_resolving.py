"""resolve(): which source comes first, and what explain() says about the others. own_path()."""

import json
from pathlib import Path

import pytest

from tfopt.distribute import own_path
from tfopt.distribute.cluster import resolving
from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.cluster.resolving import resolve
from tfopt.errors import ClusterError

ENVIRON = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})}


def test_arguments_come_first():
    cluster = resolve(ENVIRON, workers=["c:1", "d:1"], index=0)
    assert cluster == Cluster("arguments", ("c:1", "d:1"), 0)
    assert cluster.notes == ("arguments: taken; the environment was not read",)


def test_arguments_come_first_even_where_tf_config_is_wrong():
    assert resolve({"TF_CONFIG": "{"}, workers=["c:1"], index=0).source == "arguments"


def test_tf_config_comes_next():
    cluster = resolve(ENVIRON)
    assert cluster == Cluster("TF_CONFIG", ("a:1", "b:1"), 1)
    assert cluster.notes == ("arguments: none", "TF_CONFIG: taken")


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", ENVIRON["TF_CONFIG"])
    assert resolve().address == "b:1"


@pytest.mark.parametrize(
    ("environ", "note"),
    [
        ({}, "TF_CONFIG: not set"),
        ({"TF_CONFIG": ""}, "TF_CONFIG: set, and empty"),
        ({"TF_CONFIG": "{}"}, "TF_CONFIG: set, and names no cluster"),
    ],
)
def test_then_one_process_with_what_was_looked_for(environ, note):
    cluster = resolve(environ)
    assert cluster == Cluster("one process")
    schedulers = "Slurm: not in a job\n  Kubernetes: not in a pod"
    assert cluster.explain() == f"one process\n  arguments: none\n  {note}\n  {schedulers}"


def test_a_wrong_tf_config_never_becomes_one_process():
    with pytest.raises(ClusterError):
        resolve({"TF_CONFIG": "{"})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE"])
def test_several_processes_that_nobody_lists_are_refused(name):
    with pytest.raises(ClusterError, match=f"{name} says that there are several. Found: {name}='4', and none"):
        resolve({name: "4"})
    assert resolve({name: "1"}).source == resolve({name: ""}).source == "one process"
    assert resolve(ENVIRON | {name: "2"}).source == "TF_CONFIG"


def test_a_scheduler_is_one_more_source(monkeypatch):
    def from_scheduler(environ):
        return Cluster("a scheduler", ("s:1",)) if "SCHEDULER" in environ else "a scheduler: SCHEDULER is not set"

    monkeypatch.setattr(resolving, "SOURCES", (*resolving.SOURCES, from_scheduler))
    assert resolve({}).notes[-1] == "a scheduler: SCHEDULER is not set"
    assert resolve(ENVIRON | {"SCHEDULER": "1"}).source == "TF_CONFIG"
    found = resolve({"SCHEDULER": "1"})
    assert found.source == "a scheduler"
    assert found.notes[:2] == ("arguments: none", "TF_CONFIG: not set")
    assert found.notes[-1] == "a scheduler: taken"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"workers": ["a:1"]}, ValueError, "Expected workers and index, or neither. Received: no index"),
        ({"workers": "a:1", "index": 0}, TypeError, "Expected workers as a list of addresses. Received: 'a:1'"),
        ({"workers": [], "index": 0}, ClusterError, "Found: 0"),
        ({"workers": ["a:1"], "index": 1}, ClusterError, "from 0 to 0. Found: 1"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        resolve({}, **arguments)


WORKERS = ("a:1", "b:1")


@pytest.mark.parametrize("path", ["model.keras", "logs/digits.weights.h5", "e{epoch:02d}-{val_loss:.2f}.keras", "logs"])
def test_the_chief_writes_to_the_path_and_the_others_beside_it(path):
    assert own_path(path, cluster=Cluster("arguments", WORKERS, 0)) == Path(path)
    other = own_path(path, cluster=Cluster("arguments", WORKERS, 1))
    assert other == Path(path).parent / f"worker1-{Path(path).name}"


def test_one_process_writes_to_the_path(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert own_path("model.keras") == Path("model.keras")
