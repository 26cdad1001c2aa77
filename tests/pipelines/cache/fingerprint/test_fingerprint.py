import io
import random
import re
import socket
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines.cache.fingerprint import fingerprint

CHANGES, DRAWS, OPEN = "whose value may change", "whose next draw depends on those before", "outside the program"


def traced():
    return tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([]))


def table():
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0)


REFUSED = {
    "variable": (lambda: tf.Variable(1.0), f"a tf.Variable, {CHANGES}"),
    "Keras variable": (lambda: keras.Variable(1.0), f"a Keras variable, {CHANGES}"),
    "layer": (lambda: keras.layers.Dense(1), "a Keras layer, whose weights may change"),
    "model": (lambda: keras.Sequential([keras.layers.Dense(1)]), "a Keras layer, whose weights may change"),
    "seed generator": (lambda: keras.random.SeedGenerator(1), f"a Keras seed generator, {DRAWS}"),
    "metric": (keras.metrics.Mean, f"a Keras metric, {CHANGES}"),
    "optimizer": (keras.optimizers.SGD, f"a Keras optimizer, {CHANGES}"),
    "table": (table, "a lookup table, whose entries"),
    "mutable table": (lambda: tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0), "a lookup table"),
    "dataset": (lambda: tf.data.Dataset.range(3), "a tf.data.Dataset, whose elements"),
    "iterator of a dataset": (lambda: iter(tf.data.Dataset.range(3)), "an iterator, which yields something else"),
    "generator of TensorFlow": (lambda: tf.random.Generator.from_seed(1), f"a tf.random.Generator, {DRAWS}"),
    "generator of NumPy": (lambda: np.random.default_rng(1), f"a generator of NumPy, {DRAWS}"),
    "bit generator": (lambda: np.random.PCG64(1), f"a generator of NumPy, {DRAWS}"),
    "old generator of NumPy": (lambda: np.random.RandomState(1), f"a generator of NumPy, {DRAWS}"),
    "NumPy's own generator": (lambda: np.random.rand, f"`self`: a generator of NumPy, {DRAWS}"),
    "generator of Python": (lambda: random.Random(1), f"a random.Random, {DRAWS}"),
    "open text": (io.StringIO, f"an open file, which stands for something {OPEN}"),
    "iterator": (lambda: iter([1]), "an iterator, which yields something else each time"),
    "generator": (lambda: (i for i in [1]), "an iterator, which yields something else each time"),
    "lock": (threading.Lock, "a lock, which belongs to this process"),
    "reentrant lock": (threading.RLock, "a lock, which belongs to this process"),
    "event": (threading.Event, "a lock, which belongs to this process"),
    "thread": (threading.Thread, "a thread, which belongs to this process"),
    "resource": (lambda: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]), "a tensor of type resource, a handle"),
    "traced function": (traced, r"a traced tf\.function.*pass the Python function"),
    "view": (lambda: memoryview(b"a"), "memoryview, whose state cannot be read"),
    "compiled object": (lambda: np.random.SeedSequence(1), "SeedSequence, whose state compiled code holds"),
    "universal function": (lambda: np.frompyfunc(len, 1, 1), r"'len \(vectorized\)', which is not NumPy's own"),
    "hidden state": (
        type("Own", (types.SimpleNamespace,), {}),
        r"Own, whose state compiled code holds \(types\.Simple",
    ),
}


@pytest.mark.parametrize(("make", "found"), [pytest.param(*entry, id=name) for name, entry in REFUSED.items()])
def test_what_cannot_be_read_or_may_change_is_refused(make, found):
    held = make()
    text = rf"Expected 'transform' to consist of code and data.*Found transform → closure variable `held`.*{found}.*"
    with pytest.raises(ValueError, match=text + r"Pass cache_key='…'"):
        fingerprint(lambda x: (x, held), name="transform")


def test_open_files_and_sockets_are_refused(tmp_path):
    with open(tmp_path / "file", "w") as file, pytest.raises(ValueError, match=f"an open file.*{OPEN}"):
        fingerprint(file, name="source")
    with socket.socket() as connection, pytest.raises(ValueError, match=f"a socket.*{OPEN}"):
        fingerprint(connection, name="source")


@pytest.mark.slow
def test_a_symbolic_tensor_is_refused():
    found = []

    @tf.function
    def build(x):
        with pytest.raises(ValueError, match="a symbolic tensor, whose value is known only") as caught:
            fingerprint(x, name="transform")
        found.append(caught)
        return x

    build(tf.constant(1))
    assert found


SCALE = tf.Variable(2.0)


def helper(x, scale=SCALE):
    return x * scale


class Holder:
    def __init__(self, scale):
        self.scales = {"first": [scale]}

    def __call__(self, x):
        return x * self.scales["first"][0]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (SCALE, "transform: a tf.Variable"),
        ([1, {"a": SCALE}], "transform → [1] → ['a']: a tf.Variable"),
        (lambda x: x * SCALE, "transform → global `SCALE`: a tf.Variable"),
        (lambda x: helper(x), "transform → global `helper` → default of `scale`: a tf.Variable"),
        (Holder(SCALE), "transform → attribute `scales` → ['first'] → [0]: a tf.Variable"),
        (Holder(SCALE).__call__, "transform → `self` → attribute `scales` → ['first'] → [0]: a tf.Variable"),
    ],
)
def test_a_refusal_says_how_the_culprit_is_reached(value, path):
    with pytest.raises(ValueError, match=re.escape(path)):
        fingerprint(value, name="transform")


def test_a_module_that_is_not_loaded_is_refused_until_it_is(tmp_path, monkeypatch):
    (tmp_path / "late_helpers.py").write_text("raise AssertionError('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"__name__": "user"}
    exec("def f(x):\n    from late_helpers import scale\n    return scale(x)", namespace)
    with pytest.raises(ValueError, match=r"the module late_helpers, which is not loaded yet \(import it at the top"):
        fingerprint(namespace["f"], name="transform")


def test_a_part_of_a_package_that_is_not_loaded_is_refused(tmp_path, monkeypatch):
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text("")
    (tmp_path / "late_package" / "part.py").write_text("raise AssertionError('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"__name__": "user"}
    exec("import late_package\ndef f(x):\n    from late_package import part\n    return part.scale(x)", namespace)
    with pytest.raises(ValueError, match=r"the module late_package\.part, which is not loaded yet"):
        fingerprint(namespace["f"], name="transform")
