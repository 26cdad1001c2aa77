import json

import pytest
from fake_nvml import fake_nvml  # noqa: F401  it forgets which warnings were given

from tfopt.callbacks.shared.workers import WorkerRank, worker_rank


def environ(cluster, kind, index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


WORKERS = {"worker": ["a:1", "b:1"]}
CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, WorkerRank()),
        ({"TF_CONFIG": ""}, WorkerRank()),
        ({"TF_CONFIG": "{}"}, WorkerRank()),
        (environ({"worker": ["a:1"]}, "worker"), WorkerRank()),
        (environ({"chief": ["a:1"], "ps": ["b:1"]}, "chief"), WorkerRank()),
        (environ(WORKERS, "worker", 0), WorkerRank("worker0", True, ("worker0", "worker1"))),
        (environ(WORKERS, "worker", "1"), WorkerRank("worker1", False, ("worker0", "worker1"))),
        (
            environ({"worker": {"3": "a:1", "5": "b:1"}}, "worker", 5),
            WorkerRank("worker5", False, ("worker3", "worker5")),
        ),
        (environ(CHIEF, "chief"), WorkerRank("chief0", True, ("chief0", "worker0", "worker1"))),
        (environ(CHIEF, "worker", 0), WorkerRank("worker0", False, ("chief0", "worker0", "worker1"))),
        (environ({"chief": ["a:1"]}, "evaluator"), WorkerRank("evaluator0", False, ("chief0",))),
    ],
)
def test_rank(given, expected, caplog):
    assert worker_rank(given) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"cluster": [1]}',
        '{"cluster": {"worker": ["a:1", "b:1"]}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "x"}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1e999}}',
        '{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
@pytest.mark.usefixtures("fake_nvml")
def test_one_that_makes_no_sense_is_warned_of_once(text, caplog):
    assert [worker_rank({"TF_CONFIG": text}) for _ in range(2)] == [WorkerRank(), WorkerRank()]
    assert len(caplog.records) == 1
    assert "Expected TF_CONFIG to hold" in caplog.text


def test_file_names():
    assert WorkerRank().file_name("utilization") == "utilization"
    assert WorkerRank("worker1").file_name("utilization") == "utilization-worker1"
