import keras
import pytest
import tensorflow as tf

from tfopt.callbacks import throughput_figures as module
from tfopt.callbacks.throughput_figures import ModelRate, model_rate
from tfopt.hardware import Gpu


def net(policy="float32"):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, dtype=policy)])


def rate(policy="float32", flops=None, peak=None):
    """The rate of a net that has trained a step on two examples."""
    model = net(policy)
    model.compile("sgd", "mse")
    model.train_on_batch(keras.ops.zeros((2, 4)), keras.ops.zeros((2, 5)))
    return model_rate(model, None, 2, flops, peak)


@pytest.fixture
def machine(monkeypatch):
    """Says which GPUs there are, by name, and which of them TensorFlow sees."""

    def have(names, visible=None):
        found = tuple(Gpu(place, f"GPU-{place}", name, None, (9, 0), False, None) for place, name in enumerate(names))
        devices = [f"/physical_device:GPU:{place}" for place in (range(len(names)) if visible is None else visible)]
        monkeypatch.setattr(module, "gpus", lambda: found)
        monkeypatch.setattr(
            tf.config, "get_visible_devices", lambda kind: [tf.config.PhysicalDevice(name, kind) for name in devices]
        )

    return have


LISTED = {("NVIDIA H200", "bfloat16"): 989.0, ("NVIDIA H200", "tensorfloat32"): 494.5, ("NVIDIA H200", "float32"): 67.0}
LISTED |= {("Tesla T4", "float32"): 8.1, ("Tesla T4", "float16"): 65.0}


@pytest.fixture(autouse=True)
def _listed(monkeypatch):
    monkeypatch.setattr(module, "peak_tflops", lambda name, dtype: LISTED.get((name, dtype)))


@pytest.mark.parametrize(
    ("name", "policy", "expected"),
    [
        ("NVIDIA H200", "mixed_bfloat16", 989.0),
        ("NVIDIA H200", "float32", 494.5),
        ("Tesla T4", "float32", 8.1),
        ("Tesla T4", "mixed_float16", 65.0),
        ("Tesla T4", "mixed_bfloat16", None),
        ("Unheard of", "float32", None),
    ],
)
def test_the_listed_peak_of_the_gpu_and_the_dtype(machine, name, policy, expected):
    machine([name])
    assert rate(policy) == ModelRate(4 * 4 * 5, expected)


def test_without_tf32_float32_is_float32(machine):
    machine(["NVIDIA H200"])
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        assert rate().peak_tflops == 67.0
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def test_the_gpus_that_tensorflow_sees_count_if_they_are_alike(machine):
    machine(["Tesla T4", "NVIDIA H200", "NVIDIA H200"], visible=[1, 2])
    assert rate().peak_tflops == 494.5
    machine(["Tesla T4", "NVIDIA H200"])
    assert rate().peak_tflops is None
    machine(["NVIDIA H200"], visible=[])
    assert rate().peak_tflops is None


def test_what_is_given_comes_first(machine):
    machine(["NVIDIA H200"])
    assert rate("mixed_bfloat16", 7.0, 800.0) == ModelRate(7.0, 800.0)


def test_a_count_that_fails_is_survived(machine, monkeypatch):
    machine(["NVIDIA H200"])

    def fails(*given):
        raise KeyError("new in Keras")

    monkeypatch.setattr("tfopt.model.flops.fit_flops", fails)
    assert rate() == ModelRate(None, None)
    assert rate(flops=7.0) == ModelRate(7.0, 494.5)


def test_figures():
    unknown = {"model_tflops_per_second": None, "mfu_percent": None}
    assert ModelRate(None, 5.0).figures(10.0) == unknown
    assert ModelRate(1e12, 5.0).figures(None) == unknown
    assert ModelRate(1e11, None).figures(10.0) == {"model_tflops_per_second": 1.0, "mfu_percent": None}
    assert ModelRate(1e11, 4.0).figures(10.0) == {"model_tflops_per_second": 1.0, "mfu_percent": 25.0}
