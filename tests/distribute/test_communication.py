import json

import pytest
import tensorflow as tf

from tfopt.distribute.cluster import Cluster
from tfopt.distribute.communication import communication

TWO_HOSTS = Cluster("arguments", ("10.0.0.1:2222", "10.0.0.2:2222"), 0)
ONE_HOST = Cluster("arguments", ("10.0.0.1:2222", "10.0.0.1:2223"), 0)
IMPLEMENTATION = tf.distribute.experimental.CommunicationImplementation


@pytest.mark.parametrize(
    ("cluster", "gpus", "implementation", "mib"),
    [
        (TWO_HOSTS, 8, IMPLEMENTATION.NCCL, 32),
        (ONE_HOST, 1, IMPLEMENTATION.NCCL, 0),
        (TWO_HOSTS, 0, IMPLEMENTATION.RING, 0),
        (ONE_HOST, 0, IMPLEMENTATION.RING, 0),
    ],
)
def test_chosen_by_topology(cluster, gpus, implementation, mib):
    chosen = communication(cluster, gpus)
    options = chosen.options()
    assert (options.implementation, options.bytes_per_pack) == (implementation, mib * 2**20)
    assert options.timeout_seconds is None
    assert len(str(chosen).splitlines()) == 3
    assert str(chosen).startswith(f"{implementation.value}: ")
    assert json.loads(json.dumps(chosen.to_dict()))["bytes_per_pack"] == mib * 2**20
