"""Kinds of change to a program whose examples are cached on disk: `f` is the pipeline's `transform`.

Each is a program, a part of it, and what to put there. Run as a script, it prints the keys of some programs' caches.
"""

import importlib.util
import json
import tempfile
from pathlib import Path

import keras
import numpy as np

from tfopt.pipelines import plan_pipeline

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
HEAD = "import functools, os\nimport numpy as np\nimport tensorflow as tf\nimport keras\n"

_TABLE = "K = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [2, 3]), 0)\n"

# Another result, or it may be one: another key.
SEEN = {
    "constant": ("def f(x): return x * 2", "2", "3"),
    "minus zero": ("def f(x): return x + 0.0", "0.0", "-0.0"),
    "dtype": ("def f(x): return tf.cast(x, tf.float16)", "float16", "bfloat16"),
    "operation": ("def f(x): return x * 2", "*", "+"),
    "order of operands": ("def f(x): return x - x[::-1]", "x - x[::-1]", "x[::-1] - x"),
    "order of results": ("def f(x): return x, x + 1", "x, x + 1", "x + 1, x"),
    "name of a result": ("def f(x): return {'a': x}", "'a'", "'b'"),
    "lambda": ("f = lambda x: x + 1", "1", "2"),
    "default": ("def f(x, scale=1.5): return x * scale", "1.5", "1.25"),
    "global": ("K = 1\ndef f(x): return x * K", "K = 1", "K = 2"),
    "item of a global": ("K = {'a': [1, 2]}\ndef f(x): return x * K['a'][1]", "2", "3"),
    "array": ("K = np.arange(3.0, dtype='f')\ndef f(x): return x * K", "K = np", "K = -np"),
    "large tensor": (
        "K = tf.range(999.0)\ndef f(x): return x * K[4]",
        "K = tf.range(999.0)",
        "K = tf.range(2.0, 1001.0)",
    ),
    "texts": ("K = tf.constant(['a'] * 99)\ndef f(x): return tf.strings.join([K[0], tf.as_string(x)])", "'a'", "'b'"),
    "ragged tensor": ("K = tf.ragged.constant([[1.0], [2.0, 3.0]])\ndef f(x): return x * K[1, 0]", "2.0", "4.0"),
    "closure": ("def make(k):\n    def f(x): return x * k\n    return f\nf = make(1)", "make(1)", "make(2)"),
    "helper two calls deep": ("def h(x): return x + 1\ndef g(x): return h(x)\ndef f(x): return g(x)", "1", "2"),
    "partial keyword": ("def g(x, k): return k * x\nf = functools.partial(g, k=2)", "=2", "=3"),
    "state behind a method": (
        "class A:\n    def m(self, x): return x * self.k\na = A()\na.k = 1\nf = a.m",
        "= 1",
        "= 2",
    ),
    "wrapped": (
        "def twice(g):\n    @functools.wraps(g)\n    def inner(x): return g(g(x)) + 1\n    return inner\n@twice\n"
        "def f(x): return x * 5",
        "5",
        "6",
    ),
    "tf.function": ("@tf.function\ndef f(x): return x + 1", "1", "2"),
    "tf.function in another": ("@tf.function\ndef g(x): return x + 1\n@tf.function\ndef f(x): return g(x)", "1", "2"),
    "compiled by XLA": ("@tf.function(jit_compile=True)\ndef f(x): return x + 1", "True", "False"),
    "condition": ("def f(x):\n    if tf.reduce_sum(x) > 9: x = x + 1\n    return x", "9", "8"),
    "times of a loop": ("def f(x):\n    for i in tf.range(3): x = x + 1\n    return x", "3", "4"),
    "while": ("def f(x):\n    while tf.reduce_sum(x) < 9: x = x + 1\n    return x", "< 9", "< 8"),
    "case": (
        "def f(x): return tf.switch_case(tf.constant(1), [lambda: x, lambda: x + 1, lambda: x * 2])",
        "+ 1",
        "+ 2",
    ),
    "tf.map_fn": ("def f(x): return tf.map_fn(lambda y: y + 1, x)", "1", "2"),
    "vectorized_map": ("def f(x): return tf.vectorized_map(lambda y: y + 1, x)", "1", "2"),
    "dataset inside": ("def f(x): return tf.data.Dataset.range(3).reduce(x, lambda y, i: y + 1)", "1", "2"),
    "tensor in a branch": (
        "K = tf.range(99.0)\ndef f(x): return tf.cond(x[0] > 1, lambda: K[3], lambda: x[0])",
        "K[3]",
        "K[4]",
    ),
    "assertion": ("def f(x):\n    tf.debugging.assert_less(x, 99.0)\n    return x", "99.0", "98.0"),
    "stateless seed": ("def f(x): return x + tf.random.stateless_uniform((), (1, 2))", "(1, 2)", "(1, 3)"),
    "environment variable": (
        "os.environ['SCALE'] = '1'\ndef f(x): return x * float(os.environ['SCALE'])",
        "'1'",
        "'2'",
    ),
    "Keras' global settings": (
        "def f(x):\n    return keras.ops.cast(x, keras.mixed_precision.dtype_policy().name)\n"
        "keras.mixed_precision.set_dtype_policy('float16')",
        "'float16'",
        "'bfloat16'",
    ),
    "shape of the input": ("def f(x): return x * (x.shape[0] + 1)", "+ 1", "+ 2"),
    "layer without weights": ("f = keras.layers.Rescaling(2.0)", "2.0", "3.0"),
    "value in a table": (f"{_TABLE}def f(x): return K.lookup(tf.cast(x, tf.int32))", "[2, 3]", "[2, 4]"),
    "key of a table": (f"{_TABLE}def f(x): return K.lookup(tf.cast(x, tf.int32))", "[1, 2]", "[1, 3]"),
    "default of a table": (f"{_TABLE}def f(x): return K.lookup(tf.cast(x, tf.int32))", ", 0)", ", 9)"),
    "adapted vocabulary": (
        "layer = keras.layers.TextVectorization(output_sequence_length=2)\nlayer.adapt(['a 1.0'])\n"
        "def f(x): return layer(tf.as_string(x[:1]))[0]",
        "['a 1.0']",
        "['b 1.0']",
    ),
    "vocabulary": (
        "layer = keras.layers.StringLookup(vocabulary=['a', 'b'])\ndef f(x): return layer(tf.as_string(x))",
        "'b'",
        "'c'",
    ),
    "adapted moments": (
        "layer = keras.layers.Normalization()\nlayer.adapt(np.array([[1, 2, 3.0], [2, 2, 4.0]]))\n"
        "def f(x): return layer(x[None])[0]",
        "4.0",
        "5.0",
    ),
    "bins of Hashing": ("layer = keras.layers.Hashing(5)\ndef f(x): return layer(tf.as_string(x))", "5", "6"),
}

# The same result: the same key.
ALIKE = {
    "name of a local": ("def f(x):\n    y = x + 1\n    return y", "y", "result"),
    "name of a helper": ("def g(x): return x + 1\ndef f(x): return tf.map_fn(g, x)", "g", "helper"),
    "name of a tf.function": ("@tf.function\ndef g(x): return x + 1\ndef f(x): return g(x)", "g(", "helper("),
    "helper in place": ("def g(x): return x + 1\ndef f(x): return g(x)", "return g(x)", "return x + 1"),
    "what is not used": ("K = 1\ndef f(x):\n    y = x * 3\n    return x", "* 3", "* 4"),
    "gradient": ("@tf.custom_gradient\ndef f(x): return x * 2, lambda g: g * 2", "g * 2", "g * 3"),
    "message of an assertion": ("def f(x):\n    tf.debugging.assert_less(x, 99.0, 'a')\n    return x", "'a'", "'b'"),
    "name scope": ("def f(x):\n    with tf.name_scope('a'): return x + 1", "'a'", "'b'"),
    "order in a table": (
        f"{_TABLE}def f(x): return K.lookup(tf.cast(x, tf.int32))",
        "[1, 2], [2, 3]",
        "[2, 1], [3, 2]",
    ),
    "variable that is not used": ("K = 1\ndef f(x): return x", "K = 1", "K = tf.Variable(1.0)"),
}

# What a graph does not show, by the operation that is named.
REFUSED = {
    "PyFunc": "def f(x): return tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), (3,))",
    "EagerPyFunc": "def f(x): return tf.ensure_shape(tf.py_function(lambda v: v, [x], tf.float32), (3,))",
    "PyFuncStateless": (
        "def f(x): return tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32, stateful=False), (3,))"
    ),
    "ReadVariableOp": "K = tf.Variable(1.0)\ndef f(x): return x * K",
    "layer ReadVariableOp": "layer = keras.layers.Dense(3)\nlayer.build((None, 3))\ndef f(x): return layer(x[None])[0]",
    "captured variable or table": (
        "K = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, 0)\n"
        "def f(x): return K.lookup(tf.cast(x, tf.int32))"
    ),
    "inside a branch captured variable or table": (
        f"{_TABLE}def g(x): return K.lookup(tf.cast(x, tf.int32))\n"
        "def f(x): return tf.cond(x[0] > 1, lambda: g(x), lambda: tf.cast(x, tf.int32))"
    ),
    "a captured dataset": "K = tf.data.Dataset.range(3)\ndef f(x): return K.reduce(x, lambda y, i: y + 1)",
    "ReadFile": "def f(x): return x, tf.strings.length(tf.io.read_file(os.__file__))",
    "MatchingFiles": "def f(x): return x, tf.size(tf.io.matching_files(os.__file__))",
    "TextLineDataset": ("def f(x): return tf.data.TextLineDataset(os.__file__).reduce(x, lambda y, line: y + 1)"),
    "inside a branch PyFunc": (
        "def g(x): return tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), (3,))\n"
        "@tf.function\ndef f(x): return tf.cond(x[0] > 1, lambda: g(x), lambda: x)"
    ),
}


ACROSS = dict([*(SEEN | ALIKE).items()][::3])  # those that two processes compare


def made(program, folder):
    """The transform that a program defines, in a file in this folder: AutoGraph reads it there."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "user.py"
    path.write_text(HEAD + program + "\n")
    spec = importlib.util.spec_from_file_location("user", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def key(function, **options):
    """The key of its examples' cache."""
    choices = {"batch_size": 4, "cache": "/tmp/never-written", "cache_after": "transform"} | options
    return plan_pipeline(ROWS, transform=function, **choices).to_dict()["cache_key"]


def settings_restored():
    """Undoes what the programs set."""
    keras.config.set_dtype_policy("float32")


def main():
    """Prints the keys of programs by name, from the last to the first."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (program, *_) in reversed(ACROSS.items()):
            found[name] = key(made(program, folder))
            settings_restored()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
