"""TF_CONFIG: valid forms, malformed ones with the part that is wrong, and thousands of mutated ones."""

import copy
import json
import random
from typing import Any

import pytest
from three_parts import check_three_parts

from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.cluster.resolving import resolve
from tfopt.distribute.cluster.tf_config import from_tf_config
from tfopt.errors import ClusterError

TWO = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
WITH_CHIEF = {"cluster": {"worker": ["b:2", "c:3"], "chief": ["a:1"]}, "task": {"type": "worker", "index": 0}}
W0 = {"type": "worker", "index": 0}


def read(document):
    return from_tf_config({"TF_CONFIG": document if isinstance(document, str) else json.dumps(document)})


@pytest.mark.parametrize(
    ("document", "workers", "index"),
    [
        (TWO, ("a:1", "b:2"), 1),
        (WITH_CHIEF, ("a:1", "b:2", "c:3"), 1),
        (WITH_CHIEF | {"task": {"type": "chief", "index": 0}}, ("a:1", "b:2", "c:3"), 0),
        ({"cluster": {"worker": ["a:1"]}, "task": W0}, ("a:1",), 0),
        ({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}, ("a:1",), 0),
        ({"cluster": {"chief": ["a:1"], "worker": []}, "task": {"type": "chief", "index": 0}}, ("a:1",), 0),
        (TWO | {"rpc_layer": "grpc", "environment": "cloud", "job": {"scale": 1}}, ("a:1", "b:2"), 1),
        (TWO | {"task": TWO["task"] | {"trial": "7"}}, ("a:1", "b:2"), 1),
        (TWO | {"cluster": TWO["cluster"] | {"evaluator": ["e:1"]}}, ("a:1", "b:2"), 1),
    ],
)
def test_valid_forms(document, workers, index):
    assert read(document) == Cluster("TF_CONFIG", workers, index)


@pytest.mark.parametrize("text", ["", " \n", "{}", '{"cluster": {}, "task": {}}', '{"cluster": null, "foo": 1}'])
def test_an_empty_one_counts_as_not_set(text):
    assert isinstance(read(text), str)


@pytest.mark.parametrize(
    ("document", "guilty"),
    [
        ("{", "Expected TF_CONFIG to hold JSON. Found: '{'; "),
        ("{'cluster': {}}", "use double quotes"),
        ('{"a": ' + "1" * 5000 + "}", "Expected TF_CONFIG to hold JSON"),
        ([], r"Expected TF_CONFIG to be a JSON object, {…}. Found: \[\]"),
        ({"cluster": []}, "Expected 'cluster' in TF_CONFIG to be a JSON object"),
        (TWO | {"task": 1}, "Expected 'task' in TF_CONFIG to be a JSON object, {…}. Found: 1"),
        (
            TWO["cluster"] | {"task": W0},
            "Expected the jobs of TF_CONFIG under the key 'cluster'. Found: 'worker' at the",
        ),
        ({"Cluster": TWO["cluster"], "task": W0}, "Found: 'Cluster' at the top"),
        ({"cluster": TWO["cluster"]}, "Expected task.type of TF_CONFIG .* Found: None"),
        ({"task": W0}, "Expected cluster.worker in TF_CONFIG to list this process"),
        (TWO | {"task": {"type": ["worker"], "index": 0}}, r"Expected task.type of TF_CONFIG .* Found: \['worker'\]"),
        (TWO | {"task": {"type": "ps", "index": 0}}, "Found: the job 'ps'. What to do: .*ParameterServerStrategy"),
        (TWO | {"task": {"type": "evaluator", "index": 0}}, "Found: the job 'evaluator'. What to do: .*checkpoints"),
        (TWO | {"cluster": TWO["cluster"] | {"ps": ["c:1"]}}, "Found: the job 'ps'"),
        ({"cluster": {"master": ["a:1"]}, "task": W0}, "Expected cluster of TF_CONFIG .* Found: 'master'"),
        ({"cluster": {"worker": "a:1"}, "task": W0}, "Expected cluster.worker in TF_CONFIG to be a list.*'a:1'"),
        ({"cluster": {"worker": [], "chief": "a:1"}, "task": W0}, "Expected cluster.chief in TF_CONFIG to be a list"),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": W0}, "Expected at most one chief. Found: 2"),
        ({"cluster": {"worker": ["a:1", 7]}, "task": W0}, r"address of worker 1 \(TF_CONFIG\) .* Found: 7"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": W0}, "Found: workers 0 and 1 both"),
        (TWO | {"rpc_layer": "grpc+verbs"}, "Expected rpc_layer of TF_CONFIG .* Found: 'grpc.verbs'"),
    ],
)
def test_malformed_forms(document, guilty):
    with pytest.raises(ClusterError, match=guilty) as caught:
        read(document)
    check_three_parts(caught.value)


@pytest.mark.parametrize("index", [-1, 2, True, False, 0.0, 1e300, 10**400, "0", None, [0], float("nan")])
def test_an_invalid_index_is_refused(index):
    with pytest.raises(ClusterError, match=r"Expected task.index of TF_CONFIG, a worker, .* from 0 to 1\. Found: "):
        read(TWO | {"task": {"type": "worker", "index": index}})


def test_an_index_is_one_within_its_job():
    with pytest.raises(ClusterError, match=r"from 0 to 0\. Found: 1"):
        read(WITH_CHIEF | {"task": {"type": "chief", "index": 1}})
    with pytest.raises(ClusterError, match=r"from 0 to 1\. Found: 2"):
        read(WITH_CHIEF | {"task": {"type": "worker", "index": 2}})


def test_too_many_workers_are_refused():
    with pytest.raises(ClusterError, match=r"Expected 1 to 4096 workers from TF_CONFIG\. Found: 10000"):
        read({"cluster": {"worker": [f"host:{port + 1}" for port in range(10_000)]}, "task": W0})


ODD: list[Any] = [None, True, False, -1, 0, 1, 7, 10**40, 0.5, float("nan"), float("inf"), "", "worker", "chief", "ps"]
ODD += ["a:1", "a", ":", "a:0", "a:99999", "[::1]:5", "\x00", "\ud800", "x" * 5000, [], {}, [[]], {"worker": ["a:1"]}]


def places(value, found):
    """Every place in a document, as its container and key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        places(value[key], found)
    return found


def mutated_document(draw):
    document = copy.deepcopy(draw.choice([TWO, WITH_CHIEF]))
    for _ in range(draw.randint(1, 3)):
        container, key = draw.choice(places(document, []) or [(document, "task")])
        other, other_key = draw.choice(places(document, []) or [(document, "task")])
        act = draw.randrange(4)
        if act == 0:
            container[key] = copy.deepcopy(draw.choice(ODD))
        elif act == 1 and key in (container if isinstance(container, dict) else range(len(container))):
            del container[key]
        elif act == 2 and isinstance(container, list):
            container.insert(key, copy.deepcopy(draw.choice([*ODD, *container])))
        elif other_key in (other if isinstance(other, dict) else range(len(other))):
            container[key] = copy.deepcopy(other[other_key])
    return json.dumps(document, ensure_ascii=draw.random() < 0.5)


def mutated_text(draw):
    text = list(json.dumps(draw.choice([TWO, WITH_CHIEF])))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        character = (
            draw.choice('{}[]":,\\0123456789abE.-+ \n\x00\x1b\udc80é')
            if draw.random() < 0.8
            else chr(draw.randrange(0x110000))
        )
        text[at : at + draw.randint(0, 3)] = [character] * draw.randint(0, 2)
    return "".join(text)


@pytest.mark.parametrize("mutated", [mutated_document, mutated_text])
def test_five_thousand_mutated_ones_give_a_cluster_or_a_cluster_error(mutated):
    draw = random.Random(20)
    found = []
    for _ in range(5000):
        text = mutated(draw)
        try:
            cluster = resolve({"TF_CONFIG": text})
        except ClusterError as error:
            check_three_parts(error)
            continue
        found.append(cluster)
        assert resolve({"TF_CONFIG": json.dumps(cluster.tf_config())}).workers == cluster.workers, text
        assert json.dumps(cluster.to_dict())
    # Both outcomes occurred often.
    assert 100 < len(found) < 4900
