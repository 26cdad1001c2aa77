import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from watched_functions import data, is_watched, linear, total

from tfopt.xla import watch


@pytest.fixture(autouse=True)
def _functions_left_as_found():
    yield
    assert not is_watched()


def test_compilations_are_counted_with_their_cause():
    def doubled(x):  # a name of its own: compilations are compared with earlier ones of the same name
        return tf.reduce_sum(x * 2)

    f = tf.function(doubled, jit_compile=True, reduce_retracing=True)
    with watch() as compilations:
        f(tf.ones((4, 5)))
        f(tf.ones((4, 5)))
        assert compilations.count == 1
        f(tf.ones((7, 5)))
    f(tf.ones((8, 5)))
    assert compilations.count == 2
    first, second = compilations.events
    assert (first.inputs, first.changed) == ({0: "float32 (4, 5)"}, ())
    assert (second.cause, second.changed) == ("x: (4, 5) → (7, 5)", (0,))
    assert compilations.seconds == first.seconds + second.seconds > 0
    assert str(compilations).startswith("2 XLA compilations (new input signatures), ")
    assert json.loads(json.dumps(compilations.to_dict()))["count"] == 2


def test_what_tensorflow_counts_itself_are_traces():
    """A new batch size is a new compilation; the traces stay at one, which is all that TensorFlow tells."""
    f = tf.function(
        lambda x: tf.reduce_sum(x), jit_compile=True, input_signature=[tf.TensorSpec((None, 5), tf.float32)]
    )
    with watch() as compilations:
        for examples in (4, 7, 9):
            f(tf.ones((examples, 5)))
    assert f.experimental_get_tracing_count() == 1
    assert compilations.count == 3


def test_other_dtypes_and_traces():
    f = total()
    with watch() as compilations:
        f(tf.ones(3))
        f(tf.ones(3, tf.float16))
        total()(tf.ones(3))
    causes = [event.cause for event in compilations.events]
    assert causes[1] == "x: float32 (3,) → float16 (3,)"
    assert "retraced" in causes[2]


def test_gradients_are_functions_of_their_own():
    def squared(x):
        return x * x

    f, x = tf.function(squared, jit_compile=True), tf.constant([2.0])
    with watch() as compilations:
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            assert tape.gradient(y, x).numpy() == 4.0
    assert ["backward" in event.module for event in compilations.events] == [False, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("steps", [1, 2])
def test_under_fit_the_batches_that_a_dataset_yields_are_seen(steps):
    model = linear(steps_per_execution=steps)
    with watch() as compilations:
        model.fit(data(20), epochs=2, verbose=0, shuffle=False)
        assert [event.cause for event in compilations.events] == [
            "its first run in a watch",
            "x: (8, 4) → (4, 4), y: (8, 1) → (4, 1)",
        ]
        model.evaluate(data(8), verbose=0)
        model.predict(np.ones((8, 4), "float32"), verbose=0)
    assert [event.function for event in compilations.events] == ["one_step_on_data"] * 4
    assert [event.cause for event in compilations.events[2:]] == ["its first run in a watch"] * 2
    steps = ["training step", "training step", "evaluation step", "prediction step"]
    assert [event.step for event in compilations.events] == steps
    assert [line.split(":")[0].strip() for line in str(compilations).splitlines()[1:]] == steps


@pytest.mark.slow
def test_the_argument_that_changed_is_named():
    """Two inputs of the same shapes, whose keys sort in another order than they were given, and weights."""
    txt, img = keras.Input((None,), name="txt"), keras.Input((None,), name="img")
    both = keras.ops.concatenate([keras.ops.sum(x, -1, keepdims=True) for x in (txt, img)], -1)
    model = keras.Model({"txt": txt, "img": img}, keras.layers.Dense(1)(both))
    model.compile("sgd", "mse", jit_compile=True)

    def step(txt=3, img=3, weights=()):
        x = {"txt": np.ones((4, txt), "float32"), "img": np.ones((4, img), "float32")}
        model.train_on_batch(x, np.ones((4, 1), "float32"), *weights)

    with watch() as compilations:
        step()
        step(txt=5)
        step(img=6)
        step(weights=[np.ones(4, "float32")])
    assert [event.cause for event in compilations.events] == [
        "its first run in a watch",
        'x["txt"]: (4, 3) → (4, 5)',
        'x["img"]: (4, 3) → (4, 6)',
        "its first run in a watch",
    ]
    assert list(compilations.events[3].names.values()) == ['x["img"]', 'x["txt"]', "y", "sample_weight"]
    assert {event.step for event in compilations.events} == {"training step"}
    assert json.loads(json.dumps(compilations.events[1].to_dict()))["names"]["0"] == 'x["img"]'


@pytest.mark.slow
def test_functions_traced_before_the_watch_and_those_of_ones_own():
    model = linear()
    model.fit(data(8), verbose=0, shuffle=False)
    f = tf.function(lambda batch, scale: batch["a"] * scale + batch["b"][0], jit_compile=True, reduce_retracing=True)
    with watch() as compilations:
        model.fit(data(7, size=7), verbose=0, shuffle=False)
        for size in (2, 3):
            f({"b": (tf.ones(2), 1), "a": tf.ones((size, 2))}, scale=tf.constant(2.0))
    assert [event.step for event in compilations.events] == ["training step", None, None]
    assert compilations.events[2].cause == 'batch["a"]: (2, 2) → (3, 2)'


def test_without_jit_there_are_none():
    with watch() as compilations:
        tf.function(lambda x: x + 1)(tf.ones(3))
    assert (compilations.count, compilations.seconds) == (0, 0)
    assert str(compilations) == "0 XLA compilations (new input signatures), 0 s with their first runs"


def test_nested_watches_see_the_same_in_their_own_time():
    f = total()
    with watch() as outer:
        f(tf.ones(2))
        with watch() as inner:
            f(tf.ones(3))
        f(tf.ones(4))
    assert (outer.count, inner.count) == (3, 1)
    assert inner.events == outer.events[1:2]


def test_threads_that_watch_at_once():
    begun, counts = threading.Barrier(4, timeout=60), []

    def work(size):
        with watch() as compilations:
            begun.wait()
            total()(tf.ones(size))
            begun.wait()
            counts.append(compilations.count)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [4] * 4


def test_an_exception_in_the_block_leaves_nothing_behind():
    def interrupted():
        total()(tf.ones(2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watch() as compilations:
        interrupted()
    assert compilations.count == 1


def test_a_compilation_that_fails_is_not_counted():
    f = tf.function(lambda x: tf.strings.as_string(x), jit_compile=True)
    with watch() as compilations, pytest.raises(tf.errors.InvalidArgumentError):
        f(tf.ones(2))
    assert compilations.count == 0
