"""What a graph holds at its peak, in functions small enough to count it by hand."""

import pytest
import tensorflow as tf

from tfopt.memory.buffers import Phases
from tfopt.memory.graph_buffers import peak_of_graph

SQUARE = tf.TensorSpec((512, 512), "float32")  # 1 MiB
turned = tf.transpose  # makes a new tensor each time


def peak_mib(function, *inputs):
    graph = tf.function(function, autograph=False).get_concrete_function(*inputs).graph
    return round(peak_of_graph(graph, Phases([])).total / 2**20, 2)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda x: x, 0, id="nothing"),
        pytest.param(lambda x: turned(turned(turned(x))), 2, id="an input and an output at a time"),
        pytest.param(lambda x: tf.exp(tf.sin(turned(x))), 1, id="element-wise in place"),
        pytest.param(tf.exp, 1, id="not in the caller's memory"),
        pytest.param(lambda x: tf.reshape(turned(x), (-1,)), 1, id="a view"),
        pytest.param(
            lambda x: tf.transpose(tf.expand_dims(turned(x), 0), (1, 0, 2)), 1, id="a transposition that moves nothing"
        ),
        pytest.param(lambda x: (y := turned(x), tf.exp(y))[1] * y, 2, id="not in place of what another reads"),
        pytest.param(lambda x: turned(turned(x) if turned(x) is None else x), 1, id="what nobody reads does not run"),
        pytest.param(lambda x: tf.cast(turned(x), "float16"), 1.5, id="another dtype"),
        pytest.param(lambda x: turned(x) + tf.reduce_sum(x, axis=0), 1, id="a small tensor beside"),
        pytest.param(lambda x: [turned(x), tf.exp(x)], 2, id="outputs stay"),
        pytest.param(lambda x: [turned(x), turned(x)], 1, id="what repeats runs once"),
        pytest.param(lambda x: tf.function(lambda y: turned(turned(y)))(x), 2, id="a call"),
    ],
)
def test_peak(function, expected):
    assert peak_mib(function, SQUARE) == expected


def test_the_longer_branch():
    def branches(flag, x):
        return tf.cond(flag, lambda: turned(turned(turned(x))), lambda: x)

    assert peak_mib(branches, tf.TensorSpec((), "bool"), SQUARE) == 2


def test_the_gradient_of_a_loop_keeps_each_trip():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(lambda n, _: n < 10, lambda n, y: (n + 1, tf.tanh(y)), (0, x))
        return tape.gradient(y, x)

    assert 10 <= peak_mib(gradient, SQUARE) <= 12.1


def test_a_list_that_two_hold_is_copied_and_its_tensors_are_not():
    def lists(x):
        first = tf.raw_ops.EmptyTensorList(element_shape=[512, 512], max_num_elements=9, element_dtype="float32")
        first = tf.raw_ops.TensorListPushBack(input_handle=first, tensor=turned(x))
        second = tf.raw_ops.TensorListPushBack(input_handle=first, tensor=tf.exp(x))
        return [
            tf.raw_ops.TensorListPopBack(input_handle=one, element_shape=[512, 512], element_dtype="float32").tensor
            for one in (first, second)
        ]

    assert peak_mib(lists, SQUARE) == 2


@pytest.mark.parametrize(("read", "expected"), [(False, 0), (True, 2)])
def test_a_variable_is_copied_only_while_a_read_of_it_is_in_use(read, expected):
    variable = tf.Variable(tf.zeros((512, 512)))

    def step(x):
        before = variable.value()
        with tf.control_dependencies([variable.assign_add(x)]):
            return turned(before) if read else tf.constant(0)

    assert peak_mib(step, SQUARE) == expected


def test_a_new_value_takes_the_place_of_the_old():
    variable = tf.Variable(tf.zeros((512, 512)))

    def step(x):
        variable.assign(turned(x))

    def step_with_both(x):
        before = variable.value()
        with tf.control_dependencies([variable.assign(turned(x))]):
            after = turned(variable.value())
        with tf.control_dependencies([after]):
            return after, turned(before)

    assert peak_mib(step, SQUARE) == 1
    assert peak_mib(step_with_both, SQUARE) == 3


def test_a_constant_stays():
    constant = tf.ones((512, 512))

    def own():
        return tf.reshape(tf.constant([1.0] * 2**18), (512, 512))

    def loop(x):
        return tf.while_loop(lambda n, _: n < 10, lambda n, y: (n + 1, y + turned(own())), (0, x))[1]

    assert peak_mib(lambda: turned(turned(turned(own())))) == 3
    assert peak_mib(lambda: turned(constant)) == 1  # an input of the graph
    assert peak_mib(loop, SQUARE) == 3


def test_zeros_like_a_list():
    def zeros(x):
        made = tf.raw_ops.EmptyTensorList(element_shape=[512, 512], max_num_elements=9, element_dtype="float32")
        made = tf.raw_ops.TensorListPushBack(input_handle=made, tensor=turned(x))
        return made, tf.raw_ops.ZerosLike(x=made)

    assert peak_mib(zeros, SQUARE) == 2


def test_blocks_of_the_allocator():
    graph = tf.function(tf.exp, autograph=False).get_concrete_function(tf.TensorSpec((65,), "float32")).graph
    assert peak_of_graph(graph, Phases([])).total == 512


def test_what_follows_from_a_gradient_is_not_kept_for_it():
    @tf.custom_gradient
    def total(x):
        return tf.reduce_sum(x), lambda upstream: turned(upstream * tf.cos(x))  # names without "gradient_tape"

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.square(total(tf.cast(x, "float16")))
        return tape.gradient(loss, x)

    graph = tf.function(gradient, autograph=False).get_concrete_function(SQUARE).graph
    found = peak_of_graph(graph, Phases([]))
    assert round(found.total / 2**20, 1) == 1.5  # the transposed gradient, and the same as float32
    assert found.activations.total() < 2**12
