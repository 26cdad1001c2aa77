import ctypes
import json
import os
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from versions import since_tensorflow
from watched_functions import data, levels, linear, total

from tfopt.errors import UnsupportedError
from tfopt.xla import watch
from tfopt.xla import watching as watching_module
from tfopt.xla.log import framework
from tfopt.xla.log.framework import Verbosity

pytestmark = [since_tensorflow("2.20"), pytest.mark.usefixtures("left_as_found")]  # whose log can be read


@pytest.fixture
def no_reports(monkeypatch):
    def refuse(*args, **kwargs):
        raise UnsupportedError("Expected A. Found: B. Do C.")

    monkeypatch.setattr(watching_module, "Verbosity", refuse)


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
    assert compilations.source == "compilations"
    first, second = compilations.events
    assert (first.inputs, first.changed) == ({0: "float32 (4, 5)"}, ())
    assert (second.cause, second.changed) == ("x: (4, 5) → (7, 5)", (0,))
    assert compilations.seconds == first.seconds + second.seconds > 0
    assert str(compilations).startswith("2 XLA compilations, ")
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


@pytest.mark.slow
def test_other_dtypes_constants_and_traces():
    f, g = total(), tf.function(lambda x, n: tf.reshape(x, [n, -1]), jit_compile=True)
    with watch() as compilations:
        f(tf.ones(3))
        f(tf.ones(3, tf.float16))
        for n in (2, 3):
            g(tf.ones(12), tf.constant(n))
        total()(tf.ones(3))
    causes = [event.cause for event in compilations.events]
    assert causes[1] == "x: float32 (3,) → float16 (3,)"
    assert "treats as constant" in causes[3]
    assert "retraced" in causes[4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("steps", [1, 2])
def test_under_fit_the_batches_that_a_dataset_yields_are_seen(steps):
    model = linear(steps_per_execution=steps)
    with watch() as compilations:
        model.fit(data(20), epochs=2, verbose=0, shuffle=False)
        assert [event.cause for event in compilations.events] == [
            "its first compilation here",
            "x: (8, 4) → (4, 4), y: (8, 1) → (4, 1)",
        ]
        model.evaluate(data(8), verbose=0)
        model.predict(np.ones((8, 4), "float32"), verbose=0)
    assert [event.function for event in compilations.events] == ["one_step_on_data"] * 4
    assert [event.cause for event in compilations.events[2:]] == ["its first compilation here"] * 2
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
        "its first compilation here",
        'x["txt"]: (4, 3) → (4, 5)',
        'x["img"]: (4, 3) → (4, 6)',
        "its first compilation here",
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
    assert str(compilations) == "0 XLA compilations, 0 s"


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


def test_nothing_of_it_is_to_be_seen(capfd):
    with watch() as compilations:
        total()(tf.ones(2))
        os.write(2, b"mine\n")
    total()(tf.ones(3))
    assert compilations.count == 1
    seen = capfd.readouterr().err
    assert "mine\n" in seen
    for word in ("xla_compiler.cc", "Compilation of XLA", "dump_graph"):
        assert word not in seen


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_not_watched():
    before, outside = Verbosity()._before, os.fstat(2).st_ino
    reading, writing = os.pipe()
    child = None
    try:
        with watch() as compilations:
            total()(tf.ones(2))
            inside = os.fstat(2).st_ino
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                assert os.fstat(2).st_ino == inside
            else:
                os.write(writing, b"%d %d " % (os.fstat(2).st_ino == outside, Verbosity()._before == before))
        if not child:  # out of the block that it inherited, it may watch for itself
            with watch():
                os.write(writing, b"%d" % (os.fstat(2).st_ino != outside))
    finally:
        if child == 0:
            os._exit(0)
    assert os.read(reading, 100) == b"1 1 1"
    os.close(reading)
    os.close(writing)
    assert compilations.count == 1


@pytest.fixture
def log():
    """TensorFlow's log settings, to be changed by a test."""
    before, abseil = levels(), Verbosity()._abseil
    yield abseil
    for module, level in before[1].items():
        abseil.set_level(module, level)
    abseil.set_min_severity(before[0])


def test_a_silent_log_stays_silent_and_is_read(log, capfd):
    log.set_min_severity(3)
    f = tf.function(lambda x: tf.strings.as_string(x), jit_compile=True)
    with watch() as compilations:
        total()(tf.ones(2))
        with pytest.raises(tf.errors.InvalidArgumentError):
            f(tf.ones(2))  # TensorFlow logs a warning of it
    assert (compilations.count, log.min_severity()) == (1, 3)
    assert "0000 00:00:" not in capfd.readouterr().err


def test_what_the_user_has_asked_to_be_logged_is_logged_as_ever(log, capfd):
    log.set_min_severity(0)
    log.set_level(b"device_compiler", 1)
    f = total()
    with watch() as compilations:
        f(tf.ones(2))
    f(tf.ones(3))
    assert (compilations.count, log.level(b"device_compiler"), log.level(b"xla_compiler")) == (1, 1, 0)
    assert capfd.readouterr().err.count("Compilation of XLA executable") == 2


@pytest.mark.slow
def test_tensorflow_need_not_be_asked_before_it_loads():
    code = (
        "import tensorflow as tf, tfopt\n"
        "with tfopt.xla.watch() as compilations: tf.function(lambda x: x + 1, jit_compile=True)(tf.ones(3))\n"
        "print(compilations.source, compilations.count)"
    )
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("TF_CPP_VMODULE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "compilations 1\n"
    assert "xla_compiler" not in done.stderr


def test_signatures_are_counted_where_there_are_no_reports(no_reports):
    f = total()
    with watch() as compilations:
        for shape in ((4, 5), (4, 5), (7, 5)):
            f(tf.ones(shape))
        tf.function(lambda x: x + 1)(tf.ones(3))
    f(tf.ones((9, 5)))
    assert (compilations.source, compilations.count, compilations.seconds) == ("signatures", 2, None)
    assert compilations.events[1].cause == "input 0: (4, 5) → (7, 5)"
    assert str(compilations).startswith("2 input signatures of functions with jit_compile=True, without the batches")
    assert "Expected A. Found: B. Do C." in str(compilations)
    assert json.loads(json.dumps(compilations.to_dict()))["seconds"] is None


def test_signatures_of_plain_arguments_and_keywords(no_reports):
    f = tf.function(lambda x, scale=1: x * scale, jit_compile=True)
    with watch() as compilations:
        f(tf.ones(2))
        f(tf.ones(2), scale=2)
        f(tf.ones(2), scale=3)
        f(np.ones(2, "float32"), scale=3)
    assert compilations.count == 3
    assert compilations.events[2].cause == "input 1: 2 → 3"


def test_a_library_without_the_functions_is_refused(tmp_path, monkeypatch):
    library = tmp_path / "libtensorflow_framework.so.9"
    library.write_bytes(b"nothing of the kind")
    with pytest.raises(UnsupportedError, match="Expected Abseil's log settings in libtensorflow_framework"):
        framework._prefix(library)
    monkeypatch.setattr(tf.sysconfig, "get_lib", lambda: str(tmp_path / "none"))
    with pytest.raises(UnsupportedError, match="Expected libtensorflow_framework in"):
        Verbosity()
    with watch() as compilations:
        total()(tf.ones(2))
    assert (compilations.source, compilations.count) == ("signatures", 1)


def test_a_function_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(framework, "_prefix", lambda library: "_ZN4absl12lts_19700101")
    with pytest.raises(UnsupportedError, match="Expected Abseil's log settings") as caught:
        Verbosity()
    assert isinstance(caught.value.__cause__, AttributeError)
    assert ctypes.CDLL(None)
