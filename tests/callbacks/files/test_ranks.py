import json

import pytest
from fake_nvml import fake_nvml  # noqa: F401  it forgets which warnings were given

from tfopt.callbacks.files.ranks import Rank, rank


def environ(cluster, kind, index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


WORKERS = {"worker": ["a:1", "b:1"]}
CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Rank()),
        ({"TF_CONFIG": ""}, Rank()),
        ({"TF_CONFIG": "{}"}, Rank()),
        (environ({"worker": ["a:1"]}, "worker"), Rank()),
        (environ({"chief": ["a:1"], "ps": ["b:1"]}, "chief"), Rank()),
        (environ(WORKERS, "worker", 0), Rank("worker0", True, ("worker0", "worker1"))),
        (environ(WORKERS, "worker", "1"), Rank("worker1", False, ("worker0", "worker1"))),
        (environ({"worker": {"3": "a:1", "5": "b:1"}}, "worker", 5), Rank("worker5", False, ("worker3", "worker5"))),
        (environ(CHIEF, "chief"), Rank("chief0", True, ("chief0", "worker0", "worker1"))),
        (environ(CHIEF, "worker", 0), Rank("worker0", False, ("chief0", "worker0", "worker1"))),
        (environ({"chief": ["a:1"]}, "evaluator"), Rank("evaluator0", False, ("chief0",))),
    ],
)
def test_rank(given, expected, caplog):
    assert rank(given) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        '"text"',
        '{"cluster": [1]}',
        '{"cluster": {"worker": ["a:1", "b:1"]}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "x"}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": null}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1e999}}',
        '{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": 2}, "task": {"type": "worker", "index": 0}}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
@pytest.mark.usefixtures("fake_nvml")
def test_one_that_makes_no_sense_is_warned_of_once(text, caplog):
    assert [rank({"TF_CONFIG": text}) for _ in range(2)] == [Rank(), Rank()]
    assert len(caplog.records) == 1
    assert "Expected TF_CONFIG to hold" in caplog.text


def test_file_names():
    assert Rank().file_name("utilization") == "utilization"
    assert Rank("worker1").file_name("utilization") == "utilization-worker1"
