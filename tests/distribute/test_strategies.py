import json
import os
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from versions import since_keras

from tfopt import distribute, repairs
from tfopt.distribute import strategies
from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.strategies import communication
from tfopt.distribute.watchdog.barrier import MissingPeerError
from tfopt.errors import ClusterError, UnsupportedError


@pytest.fixture(autouse=True)
def _no_strategy_yet(monkeypatch):
    monkeypatch.setattr(strategies, "_made", [])
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_one_device_trains_as_without_a_strategy():
    strategy = distribute.strategy("auto")
    assert strategy is tf.distribute.get_strategy()
    assert strategy.num_replicas_in_sync == 1
    assert distribute.strategy() is distribute.strategy("one_device") is strategy
    assert distribute.explain() == f"{distribute.resolve().explain()}\none device: no strategy"


def test_one_device_gets_the_repairs_that_several_have_too():
    distribute.strategy("auto")
    states = repairs.status().states
    repaired = {name for name, state in states.items() if state == "repaired"}
    assert repaired == {name for name in repairs.ONE_DEVICE if states[name] != "absent"}
    assert repaired < set(repairs.REPLICAS)


def test_before_it_is_called_explain_resolves():
    assert distribute.explain() == distribute.resolve().explain()
    assert distribute.explain().startswith("one process\n  arguments: none\n  TF_CONFIG: not set")


def test_a_cluster_of_one_worker_is_one_process(monkeypatch):
    config = {"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert distribute.strategy("auto") is tf.distribute.get_strategy()


@pytest.mark.parametrize("kind", ["mirored", "", ["auto"]])
def test_an_unknown_kind(kind):
    with pytest.raises(ValueError, match="Expected a kind of strategy: 'auto', 'one_device', 'mirrored' or"):
        distribute.strategy(kind)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("model_parallel", r"keras\.distribution\.ModelParallel, or PyTorch's FSDP"),
        ("parameter-server", "updates asynchronously.*your own training loop"),
        ("ZeRO", r"tfopt\.distribute\.shard_optimizer.*for the gradients and weights, Keras on JAX"),
        ("zero_2", r"shards the gradients.*PyTorch's FSDP, or tfopt\.distribute\.shard_optimizer"),
        ("zero 3", r"PyTorch's FSDP, or tfopt\.distribute\.shard_optimizer"),
        ("tpu", "TPUStrategy"),
    ],
)
def test_what_keras_on_tensorflow_cannot_do_is_refused_by_name(kind, instead):
    with pytest.raises(UnsupportedError, match=instead) as refused:
        distribute.strategy(kind)
    assert repr(kind) in str(refused.value)


@since_keras("3.14")  # whose distributions need no other backend
def test_a_keras_distribution_is_refused():
    devices = ["cpu:0"]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    try:
        with pytest.raises(UnsupportedError, match="Found DataParallel, which does nothing there"):
            distribute.strategy("auto")
    finally:
        keras.distribution.set_distribution(None)
    assert distribute.strategy("auto")


def test_a_kind_that_is_insisted_on_must_be_available():
    with pytest.raises(ClusterError, match=r"several GPUs\. Found 1 device"):
        distribute.strategy("mirrored")
    with pytest.raises(ClusterError, match=r"several workers\. Found one process\. Start .*launch -n 2"):
        distribute.strategy("multi_worker")


def test_another_kind_in_the_same_process_is_refused():
    distribute.strategy("auto")
    with pytest.raises(ClusterError, match="Found 'mirrored' after 'one_device'"):
        distribute.strategy("mirrored")


def test_several_gpus_are_mirrored(monkeypatch):
    asked = []
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind: [tf.config.LogicalDevice(f"/device:{kind}:{i}", kind) for i in range(4 if kind == "GPU" else 1)],
    )
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda devices: asked.append(devices) or "mirrored")
    assert distribute.strategy("auto") == "mirrored"
    assert asked == [["GPU:0", "GPU:1", "GPU:2", "GPU:3"]]
    assert "mirrored on GPU:0, GPU:1, GPU:2, GPU:3" in distribute.explain()


@pytest.fixture
def too_late(monkeypatch):
    """The first of two workers, where TensorFlow has already started."""
    tf.zeros(1)
    config = {"cluster": {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setattr(strategies, "check_host", lambda cluster, deadline_seconds: None)
    monkeypatch.setattr(strategies, "Watch", None)


@pytest.mark.usefixtures("too_late")
def test_starting_too_late_fails_before_the_other_workers_proceed():
    with pytest.raises(ClusterError, match=r"Found: [^.]+\. What to do: .* before you create tensors"):
        distribute.strategy("auto")


@pytest.mark.slow
@pytest.mark.usefixtures("too_late")
def test_a_second_call_does_not_divide_the_gpus_again(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for _ in range(2):
        with pytest.raises(ClusterError, match="before you create tensors"):
            distribute.strategy("auto")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


CLUSTER = Cluster("arguments", ("127.0.0.1:2222", "127.0.0.1:2223"), 0)


class TestWhatToStartAgain:
    """75 makes a scheduler restart the job, for ever if nothing else changes."""

    @pytest.fixture(autouse=True)
    def _in_a_cluster(self, monkeypatch):
        monkeypatch.setattr(strategies, "resolve", lambda: CLUSTER)

    @pytest.mark.parametrize("missing", ["check_host", "_multi_worker"])
    def test_a_job_whose_peer_is_missing(self, monkeypatch, capsys, missing):
        def miss(*_, **__):
            raise MissingPeerError("Expected all. Found one.")

        monkeypatch.setattr(strategies, missing, miss)
        with pytest.raises(SystemExit) as end:
            distribute.strategy()
        assert end.value.code == 75
        assert capsys.readouterr().err == "tfopt: Expected all. Found one.\n"

    def test_but_none_that_is_described_wrongly(self, monkeypatch):
        monkeypatch.setattr(strategies, "check_host", lambda cluster, deadline_seconds: None)
        monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", lambda threads: None)
        monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", lambda threads: None)
        monkeypatch.setenv("TFOPT_WATCH_BEAT_SECONDS", "often")
        with pytest.raises(ClusterError, match=r"Expected TFOPT_WATCH_BEAT_SECONDS .* Found: 'often'\. What to do"):
            distribute.strategy()


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
    options, reasons = communication(cluster, gpus)
    assert (options.implementation, options.bytes_per_pack) == (implementation, mib * 2**20)
    assert options.timeout_seconds is None
    assert len(reasons) == 3
    assert reasons[0].startswith(f"{implementation.value}: ")


IN_ONE_PROCESS = """
import tensorflow as tf
from tfopt import distribute, repairs
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
shared = repairs.SHARED_FILES
shared.broken = dict.fromkeys(shared.broken, frozenset({"other"}))  # as in a Keras that tfopt does not know
print(distribute.strategy("auto").num_replicas_in_sync, repairs.status().states["shared_files"])
"""


@pytest.mark.slow
def test_replicas_in_one_process_do_without_what_only_several_need():
    command = [sys.executable, "-c", IN_ONE_PROCESS]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "2 unknown", ran.stderr[-2000:]
