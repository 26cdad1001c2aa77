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
HEAD = "import dataclasses, enum, functools, os, typing\nimport numpy as np\nimport tensorflow as tf\nimport keras\n"

# Another result, or it may be one: another key.
SEEN = {
    "type of a dataclass's field": (
        "@dataclasses.dataclass\nclass A:\n    k: np.float16\n"
        "def f(x): return tf.cast(x, dataclasses.fields(A)[0].type)",
        "float16",
        "float64",
    ),
    "annotation of a named tuple": (
        "class A(typing.NamedTuple):\n    k: np.float16\ndef f(x): return tf.cast(x, A.__annotations__['k'])",
        "float16",
        "float64",
    ),
    "annotation of a class": (
        "class A:\n    k: np.float16\ndef f(x): return tf.cast(x, A.__annotations__['k'])",
        "float16",
        "float64",
    ),
    "name of a function": ("def g2(): pass\nG = g2\ndef f(x): return x * float(G.__name__[1])", "g2", "g3"),
    "constant": ("def f(x): return x * 2", "2", "3"),
    "minus zero": ("def f(x): return x + 0.0", "0.0", "-0.0"),
    "dtype": ("def f(x): return tf.cast(x, tf.float16)", "float16", "bfloat16"),
    "operation": ("def f(x): return x * 2", "*", "+"),
    "order of operands": ("def f(x): return x - x[::-1]", "x - x[::-1]", "x[::-1] - x"),
    "order of results": ("def f(x): return x, x + 1", "x, x + 1", "x + 1, x"),
    "name of a result": ("def f(x): return {'a': x}", "'a'", "'b'"),
    "lambda": ("f = lambda x: x + 1", "1", "2"),
    "nested lambda": ("def f(x): return (lambda y: y + 1)(x)", "1", "2"),
    "comprehension": ("def f(x): return tf.stack([i + 1 for i in tf.unstack(x)])", "+ 1", "+ 2"),
    "generator expression": ("def f(x): return sum(i * 2 for i in tf.unstack(x))", "2", "3"),
    "default": ("def f(x, scale=1.5): return x * scale", "1.5", "1.25"),
    "keyword default": ("def f(x, *, scale=1.5): return x * scale", "1.5", "1.25"),
    "global": ("K = 1\ndef f(x): return x * K", "K = 1", "K = 2"),
    "item of a global": ("K = {'a': [1, 2]}\ndef f(x): return x * K['a'][1]", "2", "3"),
    "order of a dict": (
        "K = {'a': 1, 'b': 2}\ndef f(x): return x * [*K.values()][0]",
        "'a': 1, 'b': 2",
        "'b': 2, 'a': 1",
    ),
    "array": ("K = np.arange(3.0, dtype='f')\ndef f(x): return x * K", "K = np", "K = -np"),
    "small tensor": ("K = tf.range(3.0)\ndef f(x): return x * K", "K = tf", "K = -tf"),
    "large tensor": (
        "K = tf.range(999.0)\ndef f(x): return x * K[4]",
        "K = tf.range(999.0)",
        "K = tf.range(2.0, 1001.0)",
    ),
    "texts": ("K = tf.constant(['a'] * 99)\ndef f(x): return tf.strings.join([K[0], tf.as_string(x)])", "'a'", "'b'"),
    "ragged tensor": ("K = tf.ragged.constant([[1.0], [2.0, 3.0]])\ndef f(x): return x * K[1, 0]", "2.0", "4.0"),
    "closure": ("def make(k):\n    def f(x): return x * k\n    return f\nf = make(1)", "make(1)", "make(2)"),
    "helper": ("def g(x): return x + 1\ndef f(x): return g(x)", "1", "2"),
    "helper two calls deep": ("def h(x): return x + 1\ndef g(x): return h(x)\ndef f(x): return g(x)", "1", "2"),
    "recursion": ("def f(x, n=2): return f(x - 1, n - 1) if n else x", "x - 1", "x - 2"),
    "partial argument": ("def g(k, x): return k * x\nf = functools.partial(g, 2)", "g, 2", "g, 3"),
    "partial keyword": ("def g(x, k): return k * x\nf = functools.partial(g, k=2)", "=2", "=3"),
    "method": ("class A:\n    def m(self, x): return x + 1\nf = A().m", "1", "2"),
    "state behind a method": (
        "class A:\n    def m(self, x): return x * self.k\na = A()\na.k = 1\nf = a.m",
        "= 1",
        "= 2",
    ),
    "slots": ("class A:\n    __slots__ = 'k'\na = A()\na.k = 1\ndef f(x): return x * a.k", "k = 1", "k = 2"),
    "callable object": ("class A:\n    k = 1\n    def __call__(self, x): return x * self.k\nf = A()", "k = 1", "k = 2"),
    "base class": ("class B:\n    def m(self, x): return x + 1\nclass A(B): pass\nf = A().m", "+ 1", "+ 2"),
    "super": (
        "class B:\n    def m(self): return 1\nclass A(B):\n    def m(self): return super().m()\n"
        "def f(x): return x * A().m()",
        "return 1",
        "return 2",
    ),
    "property": ("class A:\n    @property\n    def k(self): return 1\na = A()\ndef f(x): return x * a.k", "1", "2"),
    "static method": ("class A:\n    @staticmethod\n    def k(): return 1\ndef f(x): return x * A.k()", "1", "2"),
    "class inside": ("def f(x):\n    class A:\n        k = 1\n    return x * A.k", "k = 1", "k = 2"),
    "dataclass": ("@dataclasses.dataclass\nclass A:\n    k: int = 1\na = A()\ndef f(x): return x * a.k", "A()", "A(2)"),
    "dataclass default": ("@dataclasses.dataclass\nclass A:\n    k: int = 1\ndef f(x): return x * A().k", "= 1", "= 2"),
    "docstring that is read": ("def g():\n    '2'\ndef f(x): return x * float(g.__doc__)", "'2'", "'3'"),
    "enum": ("class E(enum.Enum):\n    A = 1\ndef f(x): return x * E.A.value", "A = 1", "A = 2"),
    "wraps": (
        "def twice(g):\n    @functools.wraps(g)\n    def inner(x): return g(g(x)) + 1\n    return inner\n@twice\n"
        "def f(x): return x * 5",
        "+ 1",
        "+ 2",
    ),
    "wrapped": (
        "def twice(g):\n    @functools.wraps(g)\n    def inner(x): return g(g(x)) + 1\n    return inner\n@twice\n"
        "def f(x): return x * 5",
        "5",
        "6",
    ),
    "lru_cache": ("@functools.lru_cache\ndef g(): return 1\ndef f(x): return x * g()", "1", "2"),
    "tf.function": ("@tf.function\ndef f(x): return x + 1", "1", "2"),
    "tf.function in another": ("@tf.function\ndef g(x): return x + 1\n@tf.function\ndef f(x): return g(x)", "1", "2"),
    "method that is a tf.function": (
        "class A:\n    k = 1\n    @tf.function\n    def m(self, x): return x * self.k\na = A()\nf = a.m",
        "k = 1",
        "k = 2",
    ),
    "compiled by XLA": ("@tf.function(jit_compile=True)\ndef f(x): return x + 1", "True", "False"),
    "AutoGraph": ("def f(x):\n    if tf.reduce_sum(x) > 9: x = x + 1\n    return x", "x + 1", "x + 2"),
    "condition": ("def f(x):\n    if tf.reduce_sum(x) > 9: x = x + 1\n    return x", "9", "8"),
    "loop": ("def f(x):\n    for i in tf.range(3): x = x + 1\n    return x", "x + 1", "x + 2"),
    "times of a loop": ("def f(x):\n    for i in tf.range(3): x = x + 1\n    return x", "3", "4"),
    "while": ("def f(x):\n    while tf.reduce_sum(x) < 9: x = x + 1\n    return x", "< 9", "< 8"),
    "break": (
        "def f(x):\n    for i in tf.range(9):\n        if i > 3: break\n        x = x + 1\n    return x",
        "> 3",
        "> 4",
    ),
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
    "attribute of a package": ("def f(x): return x * np.pi", "pi", "e"),
    "function of a package": ("def f(x): return tf.sin(x)", "sin", "cos"),
    "name in a text": ("def f(x): return getattr(tf, 'sin')(x)", "sin", "cos"),
    "value set on a package": ("def f(x): return x * keras.own\nkeras.own = 1", "own = 1", "own = 2"),
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
    "image data format": (
        "def f(x): return x * (2.0 if keras.config.image_data_format() == 'channels_last' else 3.0)\n"
        "keras.config.set_image_data_format('channels_last')",
        "format('channels_last')",
        "format('channels_first')",
    ),
    "exception handler": ("def f(x):\n    try: return x + {}[0]\n    except KeyError: return x + 1", "+ 1", "+ 2"),
    "set": ("K = {'a', 'b'}\ndef f(x): return x * (2 if 'a' in K else 3)", "'a', 'b'", "'c', 'b'"),
    "length of a set": ("K = {'a', 'b'}\ndef f(x): return x * len(K)", "'a', 'b'", "'a'"),
    "attribute of a function": ("def f(x): return x * f.k\nf.k = 1", "f.k = 1", "f.k = 2"),
    "shape of the input": ("def f(x): return x * (x.shape[0] + 1)", "+ 1", "+ 2"),
    "Keras' operation": ("def f(x): return keras.ops.relu(x)", "relu", "gelu"),
    "layer without weights": ("f = keras.layers.Rescaling(2.0)", "2.0", "3.0"),
}

# The same result: the same key.
ALIKE = {
    "comment": ("def f(x): return x * 2", "2", "2  # twice"),
    "docstring": ("def f(x):\n    return x", "    ", "    'Text.'\n    "),
    "annotation": ("def f(x): return x * 2", "(x)", "(x: tf.Tensor) -> tf.Tensor"),
    "line": ("def f(x): return x * 2", "def f", "\n\nUNUSED = 1\n\ndef f"),
    "name of a local": ("def f(x):\n    y = x + 1\n    return y", "y", "result"),
    "name of a helper": ("def g(x): return x + 1\ndef f(x): return tf.map_fn(g, x)", "g", "helper"),
    "name of a tf.function": ("@tf.function\ndef g(x): return x + 1\ndef f(x): return g(x)", "g(", "helper("),
    "helper in place": ("def g(x): return x + 1\ndef f(x): return g(x)", "return g(x)", "return x + 1"),
    "constant with a name": ("K = 2\ndef f(x): return x * 2", "x * 2", "x * K"),
    "what is not used": ("K = 1\ndef f(x):\n    y = x * 3\n    return x", "* 3", "* 4"),
    "gradient": ("@tf.custom_gradient\ndef f(x): return x * 2, lambda g: g * 2", "g * 2", "g * 3"),
    "message of an assertion": ("def f(x):\n    tf.debugging.assert_less(x, 99.0, 'a')\n    return x", "'a'", "'b'"),
    "name scope": ("def f(x):\n    with tf.name_scope('a'): return x + 1", "'a'", "'b'"),
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
    "LookupTableFindV2": (
        "K = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [2, 3]), 0)\n"
        "def f(x): return K.lookup(tf.cast(x, tf.int32))"
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


ACROSS = dict([*(SEEN | ALIKE).items()][::5])  # those that two processes compare


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
    keras.config.set_image_data_format("channels_last")


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
