"""Cluster: rank, place on the host, and the descriptions it refuses."""

import json

import pytest

from tfopt.distribute.cluster.membership import ONE_PROCESS, Cluster
from tfopt.errors import ClusterError

FOUR = ("a:1", "b:1", "A:2", "a:3")


@pytest.mark.parametrize(
    ("index", "local_rank", "local_workers"),
    [(0, 0, 3), (1, 0, 1), (2, 1, 3), (3, 2, 3)],
)
def test_the_place_among_the_workers_of_a_host(index, local_rank, local_workers):
    cluster = Cluster("arguments", FOUR, index)
    assert (cluster.local_rank, cluster.local_workers) == (local_rank, local_workers)
    assert cluster.address == FOUR[index]
    assert cluster.is_chief == (index == 0)


def test_loopback_is_one_host_under_all_its_names():
    cluster = Cluster("arguments", ("localhost:1", "127.0.0.1:2", "[::1]:3"), 2)
    assert (cluster.local_rank, cluster.local_workers) == (2, 3)


def test_one_process():
    cluster = Cluster(ONE_PROCESS)
    assert str(cluster) == "one process"
    assert cluster.is_chief
    assert (cluster.address, cluster.local_rank, cluster.local_workers, cluster.tf_config()) == (None, 0, 1, {})


def test_tf_config():
    assert Cluster("arguments", FOUR, 3).tf_config() == {
        "cluster": {"worker": ["a:1", "b:1", "A:2", "a:3"]},
        "task": {"type": "worker", "index": 3},
    }


def test_str_and_explain():
    cluster = Cluster("TF_CONFIG", FOUR, 2, ("arguments: none", "TF_CONFIG: taken"))
    assert cluster.explain().splitlines() == [
        "worker 2 (A:2) of 4 workers, from TF_CONFIG",
        "  arguments: none",
        "  TF_CONFIG: taken",
        "  workers: a:1, b:1, A:2, a:3",
        "  this host: local rank 1 of 3",
    ]
    assert str(Cluster("arguments", ("a:1",), 0)) == "worker 0 (a:1, the chief) of 1 worker, from arguments"
    many = Cluster("arguments", tuple(f"a:{port}" for port in range(1, 1001)), 0)
    assert len(many.explain()) < 200


def test_to_dict_is_json():
    found = Cluster("TF_CONFIG", FOUR, 2, ("TF_CONFIG: taken",)).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found == {
        "source": "TF_CONFIG",
        "workers": list(FOUR),
        "index": 2,
        "address": "A:2",
        "is_chief": False,
        "local_rank": 1,
        "local_workers": 3,
        "notes": ["TF_CONFIG: taken"],
    }


@pytest.mark.parametrize("index", [-1, 4, True, 1.0, "1", None, 10**400, float("nan")])
def test_an_invalid_index_is_refused(index):
    with pytest.raises(ClusterError, match=r"Expected the index .* from 0 to 3\. Found: .* What to do: "):
        Cluster("arguments", FOUR, index)


@pytest.mark.parametrize(
    ("workers", "ranks"),
    [
        (("a:1", "b:1", "A.:1"), "0 and 2"),
        (("c:1", "localhost:1", "127.0.0.2:1"), "1 and 2"),
        (("[::0]:1", "[0::]:1"), "0 and 1"),
    ],
)
def test_a_repeated_address_is_refused(workers, ranks):
    with pytest.raises(ClusterError, match=f"to have its own address. Found: workers {ranks} both at port 1"):
        Cluster("arguments", workers, 0)


@pytest.mark.parametrize("count", [0, 4097, 10_000])
def test_too_few_or_too_many_workers_are_refused(count):
    with pytest.raises(ClusterError, match=f"Expected 1 to 4096 workers from arguments. Found: {count}. What to do: "):
        Cluster("arguments", tuple(f"a:{port + 1}" for port in range(count)), 0)


def test_the_guilty_address_is_named():
    with pytest.raises(ClusterError, match=r"address of worker 1 \(arguments\) .* Found: 'b'"):
        Cluster("arguments", ("a:1", "b"), 0)
