import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt import fit as tfopt_fit
from tfopt.callbacks import CompilationLogger, ThroughputLogger
from tfopt.callbacks.throughput import model_rate as module
from tfopt.callbacks.throughput.model_rate import ModelRate, model_rate
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


class Whole(keras.Model):
    """Not built before it trains."""

    def __init__(self):
        super().__init__()
        self.dense, self.recurrent = keras.layers.Dense(4), keras.layers.GRU(4)

    def call(self, inputs):
        if self.jit_compile:  # XLA has no gradient of the loop
            return self.recurrent(self.dense(inputs))
        return self.recurrent(keras.ops.fori_loop(0, 2, lambda _, x: self.dense(x), inputs))


def of_length(length, *, jit_compile=False):
    """FLOPs of a step on a sequence: one product, or two in a loop with their inputs' gradients; and a GRU's."""
    return 2 * ((2 if jit_compile else 2 * 3) * length * 16 + 3 * 2 * length * 3 * 16)


def trained(model, logger, *lengths, **options):
    for length in lengths:
        x = np.ones((20, length, 4), "float32")
        model.fit(x, np.ones((20, 4)), batch_size=8, epochs=2, verbose=0, callbacks=[logger], **options)
    return logger.flops_per_example


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"steps_per_execution": 2}])
def test_each_fit_counts_the_step_on_its_own_batches(options):
    model, logger = Whole(), ThroughputLogger()
    model.compile("sgd", "mse", **{"jit_compile": False, **options})
    jit_compile = model.jit_compile
    assert trained(model, logger, 7) == of_length(7, jit_compile=jit_compile)
    assert trained(model, logger, 5, validation_split=0.2) == of_length(5, jit_compile=jit_compile)
    assert trained(model, logger, 7) == of_length(7, jit_compile=jit_compile)


@pytest.mark.slow
def test_a_step_that_other_callbacks_wrap():
    model = net()
    model.compile("sgd", "mse", jit_compile=False)
    for overlapped, watches in ((True, 1), (False, 2), (True, 2)):
        if overlapped:
            tfopt_fit.overlap(model)
        logger = ThroughputLogger()
        callbacks = [*(CompilationLogger() for _ in range(watches)), logger]
        model.fit(np.ones((8, 4)), np.ones((8, 5)), batch_size=2, verbose=0, callbacks=callbacks)
        tfopt_fit.undo(model)
        assert logger.flops_per_example == 2 * 2 * 4 * 5


def test_without_a_graph_there_is_no_count():
    model, logger = Whole(), ThroughputLogger()
    model.compile("sgd", "mse", run_eagerly=True)
    assert trained(model, logger, 3) is None


@pytest.mark.slow
def test_batches_of_many_lengths_have_no_count():
    model, logger = Whole(), ThroughputLogger()
    model.compile("sgd", "mse", jit_compile=False)
    examples = tf.data.Dataset.range(3, 9).map(lambda length: (tf.ones((length, 4)), tf.ones(4)))
    model.fit(examples.padded_batch(2), verbose=0, shuffle=False, callbacks=[logger])
    assert logger.flops_per_example is None
