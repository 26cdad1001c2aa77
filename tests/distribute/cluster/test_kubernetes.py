"""Kubernetes pods: environments as the schedulers leave them, and wrong ones."""

import json
from pathlib import Path

import pytest

from tfopt.distribute.cluster.kubernetes import from_kubernetes
from tfopt.distribute.cluster.resolving import SOURCES, resolve
from tfopt.errors import ClusterError

RECORDED = sorted((Path(__file__).parent / "environments").glob("*.json"))
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
JOB = IN_A_POD | {"HOSTNAME": "train-1", "TFOPT_WORKERS": "train-[0-1].train:2222"}


@pytest.mark.parametrize("file", RECORDED, ids=[file.stem for file in RECORDED])
def test_the_recorded_environments(file):
    recorded = json.loads(file.read_text(encoding="utf-8"))
    cluster = resolve(recorded["environ"])
    assert (cluster.source, list(cluster.workers), cluster.index) == tuple(
        recorded[key] for key in ("source", "workers", "index")
    )


def test_it_is_asked_last():
    assert SOURCES[-1] is from_kubernetes


@pytest.mark.parametrize(
    ("environ", "note"),
    [
        ({}, "Kubernetes: not in a pod"),
        (IN_A_POD, "Kubernetes: in a pod, and TFOPT_WORKERS is not set: it trains alone"),
        (
            IN_A_POD | {"JOB_COMPLETION_INDEX": "7"},
            "Kubernetes: in pod '7' of an indexed Job, and TFOPT_WORKERS is not set: it trains alone",
        ),
    ],
)
def test_why_there_is_no_cluster(environ, note):
    assert from_kubernetes(environ) == note


@pytest.mark.parametrize("rank", range(12))
def test_every_pod_of_a_jobset_finds_its_own_place(rank):
    workers = "set-chief-0-0.set:2222,set-w-[0-1]-[0-3].set:2222,set-x-0-[08-10].set:2222"
    names = ["set-chief-0-0", *(f"set-w-{job}-{pod}" for job in range(2) for pod in range(4))]
    names += ["set-x-0-08", "set-x-0-09", "set-x-0-10"]
    cluster = from_kubernetes({"HOSTNAME": names[rank], "TFOPT_WORKERS": workers})
    assert cluster.workers == tuple(f"{name}.set:2222" for name in names)
    assert cluster.index == rank


def test_a_name_is_found_whole_and_not_by_its_beginning():
    environ = {"TFOPT_WORKERS": "train-[0-11].train:2222"}
    assert from_kubernetes(environ | {"HOSTNAME": "train-1"}).index == 1
    assert from_kubernetes(environ | {"HOSTNAME": "train-11"}).index == 11
    assert from_kubernetes(environ | {"HOSTNAME": "train-11.train.default.svc"}).index == 11


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"HOSTNAME": "train-2"}, "Expected HOSTNAME, 'train-2', .* Found: train-0.train, train-1.train. What to do:"),
        ({"HOSTNAME": "node-7"}, "With hostNetwork, HOSTNAME is the node's: set it to the pod's in env"),
        ({"TFOPT_WORKERS": ""}, "Expected TFOPT_WORKERS to list the pods' addresses. Found: '', which is not such"),
        ({"TFOPT_WORKERS": "train-[0-1].train"}, "Expected the address of worker 0 .* Found: 'train-0.train'"),
        ({"TFOPT_WORKERS": "train-[1-0].train:2222"}, "an indexed Job: <Job>-.0-<completions - 1>.*a JobSet: "),
        ({"TFOPT_WORKERS": "train-[0-1].a:2222,train-1.b:2222"}, "Found: it 2 times"),
        ({"TFOPT_WORKERS": "train-[0-1].train:2222,train-0.train:2222"}, "Found: workers 0 and 2 both at port 2222"),
        ({"TFOPT_WORKERS": "train-[0-9999].train:2222"}, "Expected 1 to 4096 workers from Kubernetes. Found: 10000"),
        ({"TFOPT_WORKERS": "train-[0-999999999].train:2222"}, "Expected TFOPT_WORKERS to list the pods' addresses"),
    ],
)
def test_wrong_variables(changed, said):
    with pytest.raises(ClusterError, match=said) as caught:
        resolve(JOB | changed)
    text = str(caught.value)
    assert text.startswith("Expected ")
    assert ". Found: " in text
    assert ". What to do: " in text
    assert len(text) < 1000
