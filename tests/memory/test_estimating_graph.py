"""What a graph holds at its peak, in functions small enough to count it by hand."""

import pytest
import tensorflow as tf

from tfopt.memory.graph_peak import peak_of_graph
from tfopt.memory.peak import Phases

SQUARE = tf.TensorSpec((512, 512), "float32")  # 1 MiB
turned = tf.transpose  # makes a new tensor each time


def peak_of(function, *inputs):
    graph = tf.function(function, autograph=False).get_concrete_function(*inputs).graph
    return peak_of_graph(graph, Phases([]))


def peak_mib(function, *inputs):
    return round(peak_of(function, *inputs).total / 2**20, 2)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda x: x, 0, id="nothing"),
        pytest.param(lambda x: tf.exp(tf.sin(turned(x))), 1, id="in place"),
        pytest.param(tf.exp, 1, id="not in the caller's memory"),
        pytest.param(lambda x: tf.reshape(turned(x), (-1,)), 1, id="a view"),
        pytest.param(lambda x: tf.identity_n([turned(x), tf.exp(x)])[0], 1, id="one of several identities"),
        pytest.param(lambda x: (y := turned(x), tf.exp(y))[1] * y, 2, id="not in place of what another reads"),
        pytest.param(lambda x: turned(turned(x) if turned(x) is None else x), 1, id="what nobody reads does not run"),
        pytest.param(lambda x: tf.cast(turned(x), "float16"), 1.5, id="another dtype"),
        pytest.param(lambda x: turned(x) + tf.reduce_sum(x, axis=0), 1, id="a small tensor beside"),
        pytest.param(lambda x: [turned(x), tf.exp(x)], 2, id="outputs stay"),
        pytest.param(lambda x: tf.function(lambda y: tf.cast(turned(y), "float16"))(x), 1.5, id="a call"),
        pytest.param(lambda x: tf.exp(x) + tf.reduce_sum(turned(turned(turned(x)))), 2, id="what can run early does"),
    ],
)
def test_peak(function, expected):
    assert peak_mib(function, SQUARE) == expected


@pytest.mark.parametrize("long_one_first", [False, True])
def test_the_longest_branch(long_one_first):
    def branches(flag, x):
        both = [lambda: tf.cast(tf.cast(turned(x), "float64"), "float32"), lambda: x]
        return tf.cond(flag, *(both if long_one_first else reversed(both)))

    assert peak_mib(branches, tf.TensorSpec((), "bool"), SQUARE) == 3


def test_any_of_several_branches():
    def branches(number, x):
        return tf.switch_case(number, [lambda: x, lambda: tf.cast(tf.cast(turned(x), "float64"), "float32")])

    assert peak_mib(branches, tf.TensorSpec((), "int32"), SQUARE) == 3


def gradient_of_loop(trips):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(lambda n, _: n < trips, lambda n, y: (n + 1, tf.tanh(y)), (0, x))
        return tape.gradient(y, x)

    return gradient


def test_the_gradient_of_a_loop_keeps_each_trip():
    assert 10 <= peak_mib(gradient_of_loop(10), SQUARE) <= 14
    grown = peak_mib(gradient_of_loop(20), SQUARE) - peak_mib(gradient_of_loop(10), SQUARE)
    assert grown == pytest.approx(10, abs=0.1)


def test_a_loop_in_a_loop_keeps_each_trip_of_both():
    def gradient(x):
        def inner(y):
            return tf.while_loop(lambda n, _: n < 5, lambda n, z: (n + 1, tf.tanh(z)), (0, y))[1]

        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(lambda n, _: n < 4, lambda n, y: (n + 1, inner(y)), (0, x))
        return tape.gradient(y, x)

    assert 20 <= peak_mib(gradient, SQUARE) <= 30


def test_a_loop_keeps_what_it_replaces_only_once():
    def loop(x):
        return tf.while_loop(lambda n, _: n < 10, lambda n, y: (n + 1, turned(y)), (0, x))[1]

    assert peak_mib(loop, SQUARE) == 2


def test_two_lists_share_their_tensors():
    def lists(x):
        first = tf.raw_ops.EmptyTensorList(element_shape=[512, 512], max_num_elements=9, element_dtype="float32")
        first = tf.raw_ops.TensorListPushBack(input_handle=first, tensor=turned(x))
        second = tf.raw_ops.TensorListPushBack(input_handle=first, tensor=tf.exp(x))
        return [
            tf.raw_ops.TensorListPopBack(input_handle=one, element_shape=[512, 512], element_dtype="float32").tensor
            for one in (first, second)
        ]

    assert peak_mib(lists, SQUARE) == 2


def test_zeros_like_a_list():
    def zeros(x):
        made = tf.raw_ops.EmptyTensorList(element_shape=[512, 512], max_num_elements=9, element_dtype="float32")
        made = tf.raw_ops.TensorListPushBack(input_handle=made, tensor=turned(x))
        return made, tf.raw_ops.ZerosLike(x=made)

    assert peak_mib(zeros, SQUARE) == 2


def test_what_follows_from_a_gradient_is_not_kept_for_it():
    @tf.custom_gradient
    def total(x):
        return tf.reduce_sum(x), lambda upstream: turned(upstream * tf.cos(x))  # names without "gradient_tape"

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.square(total(tf.cast(x, "float16")))
        return tape.gradient(loss, x)

    found = peak_of(gradient, SQUARE)
    assert round(found.total / 2**20, 1) == 1.5  # the transposed gradient, and the same as float32
    assert found.activations.total() < 2**12
