"""What keeps cuDNN away: the machine, the step, the shapes."""

import keras
import pytest
import tensorflow as tf
from plain_attention import draw

from tfopt.errors import UnsupportedError
from tfopt.internals.runtime import is_op_determinism_enabled
from tfopt.kernels import dot_product_attention
from tfopt.kernels.cudnn import support

HEADS = [
    ("bfloat16", 64, 64, None),
    ("float16", 128, 128, None),
    ("float16", 8, 8, None),
    ("float32", 64, 64, "float32, where cuDNN takes bfloat16 or float16"),
    ("float64", 64, 64, "float64, where cuDNN takes bfloat16 or float16"),
    ("bfloat16", 136, 136, "heads of size 136, where cuDNN takes multiples of 8 up to 128"),
    ("bfloat16", 60, 60, "heads of size 60, where cuDNN takes multiples of 8 up to 128"),
    ("bfloat16", 0, 0, "heads of size 0, where cuDNN takes multiples of 8 up to 128"),
    ("bfloat16", 64, 32, "keys of size 64 with values of size 32"),
]
SHAPES = [
    ((2, 64, 4, 8), (2, 64, 4, 8), None),
    ((2, 333, 4, 8), (2, 333, 4, 8), None),
    ((2, 64, 4, 8), (2, 100, 4, 8), None),
    ((2, 63, 4, 8), (2, 64, 4, 8), "a sequence of 63, below 64"),
    ((2, 64, 4, 8), (2, 1, 4, 8), "a sequence of 1, below 64"),
    ((None, 64, 4, 8), (None, 64, 4, 8), "a batch of no fixed size"),
    ((None, None, 4, 8), (None, 64, 4, 8), "a batch and sequence of no fixed size"),
    ((0, 64, 4, 8), (0, 64, 4, 8), "an empty query (0, 64, 4, 8)"),
    ((2, 64, 0, 8), (2, 64, 0, 8), "an empty query (2, 64, 0, 8)"),
    ((2, 64, 4, 8), (1, 64, 4, 8), "different shapes (2, 64, 4, 8), (1, 64, 4, 8) and (1, 64, 4, 8)"),
]


def found(query, key, value=None, dtype=tf.bfloat16):
    return list(support.obstacles(*(tf.TensorSpec(shape, dtype) for shape in (query, key, value or key))))


@pytest.mark.parametrize(("dtype", "size", "value_size", "obstacle"), HEADS)
def test_data_types_and_sizes(cudnn, uncompiled, dtype, size, value_size, obstacle):
    expected = [obstacle] if obstacle else []
    assert found((2, 64, 4, size), (2, 64, 4, size), (2, 64, 4, value_size), dtype) == expected
    if size == value_size == 64:
        assert list(support.standing_obstacles(dtype)) == expected


@pytest.mark.parametrize(("query", "key", "obstacle"), SHAPES)
def test_shapes(cudnn, uncompiled, query, key, obstacle):
    assert found(query, key) == ([obstacle] if obstacle else [])


def test_unlike_types(cudnn, uncompiled):
    specs = [tf.TensorSpec((2, 64, 4, 8), dtype) for dtype in (tf.bfloat16, tf.float16, tf.bfloat16)]
    assert list(support.obstacles(*specs)) == ["different data types (bfloat16, float16, bfloat16)"]


@pytest.mark.parametrize(
    ("capabilities", "obstacle"),
    [([], "no GPU"), ([(7, 5)], "a GPU older than Ampere"), ([(9, 0), (7, 0)], "a GPU older than Ampere")],
)
def test_machines(monkeypatch, capabilities, obstacle):
    monkeypatch.setattr(support, "compute_capabilities", lambda: capabilities)
    assert list(support.standing_obstacles("bfloat16")) == [obstacle]


def test_this_machine():
    assert len(support.compute_capabilities()) == len(tf.config.list_physical_devices("GPU"))


def test_op_determinism(cudnn, monkeypatch):
    assert not is_op_determinism_enabled()
    monkeypatch.setattr(support, "is_op_determinism_enabled", lambda: True)
    assert "op determinism" in next(support.standing_obstacles("bfloat16"))


def test_whether_xla_compiles_what_is_traced():
    seen = {}

    def note(where):
        seen[where] = support.in_xla()
        return tf.zeros(())

    @tf.function(jit_compile=True)
    def compiled(x):
        inner = tf.function(lambda: note("a function inside"))()
        return inner + tf.cond(x > 0, lambda: note("a branch"), lambda: 0.0) + note("compiled")

    @tf.function
    def graph(x):
        return compiled(x) + note("around it")

    graph(tf.ones(()))
    note("eagerly")
    expected = {"compiled": True, "a function inside": True, "a branch": True, "around it": False, "eagerly": False}
    assert seen == expected


def test_the_device_is_that_of_the_call():
    seen = []

    @tf.function(jit_compile=True)
    def compiled(x):
        seen.append(support.device_type())
        return x

    with tf.device("CPU:0"):
        tf.function(lambda: compiled(tf.ones(2)))()
    assert seen == ["CPU"]


def test_a_compiled_step_on_a_cpu_stays_plain(cudnn, monkeypatch):
    """Where a GPU is there, and the step runs on the CPU all the same."""
    monkeypatch.setattr(support, "device_type", lambda: "CPU")
    monkeypatch.setattr(support, "in_xla", lambda: True)
    assert found((2, 64, 4, 8), (2, 64, 4, 8)) == ["not placed on a GPU"]


def test_a_strategy_stays_plain(cudnn, uncompiled):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        assert found((2, 64, 4, 8), (2, 64, 4, 8)) == ["a distribution strategy"]
    inside = []
    strategy.run(lambda: inside.extend(found((2, 64, 4, 8), (2, 64, 4, 8))))
    assert inside == ["a distribution strategy"]


def test_forward_mode_stays_plain(cudnn, uncompiled):
    """Through the kernel it failed inside of TensorFlow, with an error that named neither."""
    query = draw(2, 64, 2, 8, dtype="bfloat16")

    def derivative(attention):
        with tf.autodiff.ForwardAccumulator(query, tf.sin(query)) as accumulator:
            output = attention(query, query, query)
        return accumulator.jvp(output)

    found = tf.function(lambda: derivative(dot_product_attention))()
    assert not cudnn.calls
    assert (
        found.numpy().tobytes() == tf.function(lambda: derivative(keras.ops.dot_product_attention))().numpy().tobytes()
    )


@pytest.mark.slow
def test_forward_mode_around_a_function_is_refused(cudnn, uncompiled):
    query = draw(2, 64, 2, 8, dtype="bfloat16")
    traced = tf.function(lambda query: dot_product_attention(query, query, query))
    with (
        pytest.raises(UnsupportedError, match="gradient of cuDNN attention's gradient"),
        tf.autodiff.ForwardAccumulator(query, query) as accumulator,
    ):
        accumulator.jvp(traced(query))
