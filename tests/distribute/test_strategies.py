import json

import keras
import pytest
import tensorflow as tf

from tfopt import distribute
from tfopt.distribute import strategies
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
    assert distribute.explain().splitlines() == [
        "one process",
        "  arguments: none",
        "  TF_CONFIG: not set",
        "one device: as without a strategy",
    ]


def test_before_it_is_called_explain_resolves():
    assert distribute.explain() == "one process\n  arguments: none\n  TF_CONFIG: not set"


def test_a_cluster_of_one_worker_is_one_process(monkeypatch):
    config = {"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert distribute.strategy("auto") is tf.distribute.get_strategy()


@pytest.mark.parametrize("kind", ["mirored", "", None, 3, ["auto"]])
def test_an_unknown_kind(kind):
    with pytest.raises(ValueError, match="Expected a kind of strategy: 'auto', 'one_device', 'mirrored' or"):
        distribute.strategy(kind)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("model_parallel", r"keras\.distribution\.ModelParallel, or PyTorch's FSDP"),
        ("FSDP", "PyTorch's FSDP"),
        ("parameter-server", "asynchronous updates.*loop of its own"),
        ("ZeRO", "optimizer's state"),
        ("tpu", "TPUStrategy"),
    ],
)
def test_what_keras_on_tensorflow_cannot_do_is_refused_by_name(kind, instead):
    with pytest.raises(UnsupportedError, match=instead) as refused:
        distribute.strategy(kind)
    assert repr(kind) in str(refused.value)


def test_a_keras_distribution_is_refused():
    devices = ["cpu:0"]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    try:
        with pytest.raises(UnsupportedError, match="Found DataParallel, which does nothing there"):
            distribute.strategy("auto")
    finally:
        keras.distribution.set_distribution(None)
    assert distribute.strategy("auto")


def test_what_is_insisted_on_has_to_be_there():
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


def test_too_late_for_a_cluster_is_said(monkeypatch):
    tf.zeros(1)  # TensorFlow has started
    config = {"cluster": {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setattr(strategies, "check_host", lambda cluster: None)
    monkeypatch.setattr(strategies, "_watch", lambda cluster, seconds: None)
    with pytest.raises(ClusterError, match="before anything else of TensorFlow"):
        distribute.strategy("auto")
