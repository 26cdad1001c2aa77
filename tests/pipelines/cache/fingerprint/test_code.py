import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfopt

ROOT = Path(tfopt.__file__).parents[1]

# What a user may write, and what to replace in it so that `f` computes something else.
ZOO = {
    "constant": ("def f(x): return x * 2", "2", "3"),
    "constant of another type": ("def f(x): return x * 2", "2", "2.0"),
    "operation": ("def f(x): return x * 2", "*", "+"),
    "order of operands": ("def f(x, y): return x - y", "x - y", "y - x"),
    "lambda": ("f = lambda x: x + 1", "1", "2"),
    "nested lambda": ("def f(x): return (lambda y: y + 1)(x)", "1", "2"),
    "comprehension": ("def f(x): return [i + 1 for i in x]", "1", "2"),
    "comprehension that names a global": ("K = 1\ndef f(x): return [i + K for i in x]", "K = 1", "K = 2"),
    "generator expression": ("def f(x): return sum(i * 2 for i in x)", "2", "3"),
    "default": ("def f(x, scale=1.5): return x * scale", "1.5", "1.25"),
    "keyword default": ("def f(x, *, scale=1.5): return x * scale", "1.5", "1.25"),
    "default moved": ("def f(x, a=1, *, b=2): return x * a - b", "a=1, *, b=2", "a=2, *, b=1"),
    "global": ("K = 1\ndef f(x): return x * K", "K = 1", "K = 2"),
    "global minus zero": ("K = 0.0\ndef f(x): return x * K", "K = 0.0", "K = -0.0"),
    "global list": ("K = [1, [2, 3]]\ndef f(x): return x * K[0]", "3", "4"),
    "global dict": ("K = {'a': 1}\ndef f(x): return x * K['a']", "1", "2"),
    "order of a dict": ("K = {'a': 1, 'b': 2}\ndef f(x): return [*K]", "'a': 1, 'b': 2", "'b': 2, 'a': 1"),
    "global array": ("import numpy as np\nK = np.arange(9)\ndef f(x): return x * K", "(9)", "(9)[::-1]"),
    "undefined global": ("def f(x): return x * LATER", "LATER", "SOONER"),
    "closure": ("def make(k):\n    def f(x): return x * k\n    return f\nf = make(1)", "make(1)", "make(2)"),
    "array in a closure": (
        "import numpy as np\ndef make(k): return lambda x: x * k\nf = make(np.ones(3))",
        "np.ones(3)",
        "np.array([1.0, 1.0, 2.0])",
    ),
    "empty cell": (
        "def make():\n    def f(x): return x * k\n    return f\n    k = 1\nf = make()",
        "return f\n    k",
        "k",
    ),
    "helper": ("def g(x): return x + 1\ndef f(x): return g(x)", "1", "2"),
    "helper two calls deep": ("def h(x): return x + 1\ndef g(x): return h(x)\ndef f(x): return g(x)", "1", "2"),
    "mutual recursion": ("def g(x): return f(x - 1)\ndef f(x): return x and g(x)", "- 1", "- 2"),
    "recursion": ("def f(x): return x and f(x - 1)", "- 1", "- 2"),
    "partial argument": ("from functools import partial\ndef g(k, x): return k * x\nf = partial(g, 2)", "g, 2", "g, 3"),
    "partial keyword": ("from functools import partial\ndef g(x, k): return k * x\nf = partial(g, k=2)", "=2", "=3"),
    "partial's function": ("from functools import partial\nimport math\nf = partial(math.fmod, 2)", "fmod", "pow"),
    "method": ("class A:\n    def m(self, x): return x + 1\nf = A().m", "1", "2"),
    "state behind a method": ("class A:\n    def m(self, x): return x\na = A()\na.k = 1\nf = a.m", "k = 1", "k = 2"),
    "slots": (
        "class A:\n    __slots__ = ('k',)\n    def m(self, x): return x\na = A()\na.k = 1\nf = a.m",
        "k = 1",
        "k = 2",
    ),
    "callable object": ("class A:\n    k = 1\n    def __call__(self, x): return x * self.k\nf = A()", "k = 1", "k = 2"),
    "class in a closure": (
        "class A:\n    def m(self, x): return x + 1\ndef make(kind): return lambda x: kind().m(x)\nf = make(A)",
        "x + 1",
        "x + 2",
    ),
    "base class": (
        "class B:\n    def m(self, x): return x + 1\nclass A(B): pass\ndef f(x): return A().m(x)",
        "+ 1",
        "+ 2",
    ),
    "super": (
        "class B:\n    def m(self): return 1\nclass A(B):\n    def m(self): return super().m()\n"
        "def f(x): return A().m()",
        "return 1",
        "return 2",
    ),
    "property": ("class A:\n    @property\n    def k(self): return 1\na = A()\ndef f(x): return x * a.k", "1", "2"),
    "static method": ("class A:\n    @staticmethod\n    def k(): return 1\ndef f(x): return A.k()", "1", "2"),
    "class method": ("class A:\n    @classmethod\n    def k(cls): return 1\ndef f(x): return A.k()", "1", "2"),
    "cached property": (
        "import functools\nclass A:\n    @functools.cached_property\n    def k(self): return 1\ndef f(x): return A().k",
        "1",
        "2",
    ),
    "class inside": ("def f(x):\n    class A:\n        'text'\n        k = 1\n    return x * A.k", "k = 1", "k = 2"),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass A:\n    k: int = 1\na = A()\n"
        "def f(x): return x * a.k",
        "A()",
        "A(2)",
    ),
    "dataclass default": (
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    k: int = 1\ndef f(x): return x * A().k",
        "= 1",
        "= 2",
    ),
    "dataclass metadata": (
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    k: int = dataclasses.field(metadata={'m': 1})\n"
        "def f(x): return dataclasses.fields(A)",
        "'m': 1",
        "'m': 2",
    ),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = 1\ndef f(x): return x * E.A.value", "A = 1", "A = 2"),
    "named tuple": (
        "import collections\nT = collections.namedtuple('T', 'a b')\nt = T(1, 2)\ndef f(x): return t.a",
        "a b",
        "b a",
    ),
    "wraps": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(x): return g(g(x)) + 1\n"
        "    return inner\n@twice\ndef f(x): return x * 5",
        "+ 1",
        "+ 2",
    ),
    "wrapped": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(x): return g(g(x)) + 1\n"
        "    return inner\n@twice\ndef f(x): return x * 5",
        "5",
        "6",
    ),
    "wraps of an installed function": (
        "import functools\nimport textwrap\n@functools.wraps(textwrap.dedent)\ndef f(x): return x + 1",
        "+ 1",
        "+ 2",
    ),
    "lru_cache": ("import functools\n@functools.lru_cache\ndef f(x): return x + 1", "1", "2"),
    "context manager": (
        "import contextlib\n@contextlib.contextmanager\ndef f(): yield 1",
        "yield 1",
        "yield 2",
    ),
    "tf.function": ("import tensorflow as tf\n@tf.function\ndef f(x): return x + 1", "1", "2"),
    "tf.function's signature": (
        "import tensorflow as tf\n@tf.function(input_signature=[tf.TensorSpec([], tf.int32)])\ndef f(x): return x + 1",
        "tf.int32",
        "tf.int64",
    ),
    "method that is a tf.function": (
        "import tensorflow as tf\nclass A:\n    k = 1\n    @tf.function\n    def m(self, x): return x * self.k\n"
        "a = A()\nf = a.m",
        "k = 1",
        "k = 2",
    ),
    "not converted": (
        "import tensorflow as tf\n@tf.autograph.experimental.do_not_convert\ndef f(x): return x + 1",
        "1",
        "2",
    ),
    "custom gradient": (
        "import tensorflow as tf\n@tf.custom_gradient\ndef f(x): return x, lambda g: g * 2",
        "2",
        "3",
    ),
    "attribute of a package": ("import numpy as np\ndef f(x): return np.sin(x)", "np.sin", "np.cos"),
    "chain into a package": ("import os\ndef f(x): return os.path.join(x)", "os.path.join", "os.path.split"),
    "function of a package": ("from math import sin as g\ndef f(x): return g(x)", "sin", "cos"),
    "universal function": ("from numpy import sin as g\ndef f(x): return g(x)", "sin", "cos"),
    "compiled function of NumPy": ("from numpy import mean as g\ndef f(x): return g(x)", "mean", "median"),
    "function of TensorFlow": ("from tensorflow import sin as g\ndef f(x): return g(x)", "sin", "cos"),
    "function made by TensorFlow": (
        "from tensorflow.experimental.numpy import nansum as g\ndef f(x): return g(x)",
        "nansum",
        "nanprod",
    ),
    "built-in": ("def f(x): return max(x)", "max", "min"),
    "method of a type": ("f = str.upper", "upper", "lower"),
    "compiled method": ("f = 'a'.join", "'a'", "'b'"),
    "bound to a text": ("f = {'a': 1}.get", "'a': 1", "'a': 2"),
    "import": ("def f(x):\n    import math\n    return math.sin(x)", "math.sin", "math.cos"),
    "import as": ("def f(x):\n    import os.path as p\n    return p.join(x)", "import os.path as", "import json as"),
    "import from": ("def f(x):\n    from math import sin as g\n    return g(x)", "sin", "cos"),
    "missing import": ("def f(x):\n    import no_such_one\n    return x", "no_such_one", "no_such_two"),
    "pattern": ("import re\nP = re.compile('a')\ndef f(x): return P.match(x)", "'a'", "'a', re.I"),
    "attribute of a function": ("def f(x): return x * f.k\nf.k = 1", "f.k = 1", "f.k = 2"),
    "exception handler": (
        "def f(x):\n    try: return x[0]\n    except KeyError: return 1",
        "KeyError",
        "IndexError",
    ),
    "set": ("K = {'a', 'b', 'c'}\ndef f(x): return x in K", "'c'", "'d'"),
    "set of functions": ("def g(x): return 1\ndef h(x): return 2\nK = {g, h}\ndef f(x): return K", "1", "3"),
    "frozenset among the constants": ("def f(x): return x in {'a', 'b', 'c'}", "'c'", "'d'"),
    "star arguments": ("def f(*x): return x", "*x", "**x"),
    "starred call": ("def f(g, x): return g(*x)", "*x", "x"),
    "names of keywords": ("def f(g, x): return g(a=x)", "a=x", "b=x"),
    "constant behind 300 others": (
        f"def f(x): return [x, {', '.join(f'{i}.5' for i in range(300))}]",
        "299.5",
        "299.25",
    ),
}


def sources():
    return [pytest.param(*entry, id=name) for name, entry in ZOO.items()]


@pytest.mark.parametrize(("source", "old", "new"), sources())
def test_what_computes_something_else_has_another_fingerprint(load, prints, source, old, new):
    assert old in source
    changed = source.replace(old, new)
    assert prints(load(source, "user").f) != prints(load(changed, "user").f)


@pytest.mark.parametrize(("source", "old", "new"), sources())
def test_what_is_moved_to_another_line_and_file_has_the_same(load, prints, source, old, new):
    moved = '"""A module."""\n\n# Reasons.\n\nUNUSED = 1\n\n\n' + source.replace("\n", "  # why\n")
    assert prints(load(source).f) == prints(load(moved).f)


def test_docstrings_and_annotations_do_not_count(load, prints):
    plain = load("class A:\n    k = 1\ndef f(x, y=1):\n    return A, None, 'a'").f
    told = load(
        "class A:\n    'A class.'\n    k: int = 1\n"
        "def f(x: 'int', y: int = 1) -> int:\n    'Text.'\n    return A, None, 'a'"
    ).f
    assert prints(plain) == prints(told)
    inside = "def f(x):\n    class A:\n        '{}'\n    return A"
    assert prints(load(inside.format("One.")).f) == prints(load(inside.format("Two.")).f)


@pytest.mark.slow
def test_other_processes_give_the_same(load, prints):
    here = {name: prints(load(source, "user").f) for name, (source, _, _) in ZOO.items()}
    script = (
        "import json, sys, types\n"
        "from tfopt.pipelines.cache.fingerprint import fingerprint\n"
        "result = {}\n"
        "for name, source in json.load(sys.stdin).items():\n"
        "    module = types.ModuleType('elsewhere')\n"
        "    exec(compile(source, '<elsewhere>', 'exec'), module.__dict__)\n"
        "    result[name] = fingerprint(module.f, name='transform')\n"
        "print(json.dumps(result))\n"
    )
    # The tests' own process has a random seed.
    environ = {**os.environ, "PYTHONHASHSEED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    output = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps({name: source for name, (source, _, _) in ZOO.items()}),
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(output.stdout.splitlines()[-1]) == here


@pytest.mark.parametrize("used", ["helpers.scale(x)", "helpers.inner.scale(x)", "(lambda: helpers.scale)()(x)"])
def test_of_a_users_module_only_what_is_named_counts(load, prints, used):
    def print_of(helper):
        module = load("K = 0", "helpers")
        module.inner = load(helper, "helpers.inner")
        exec(helper, module.__dict__)
        return prints(load(f"import helpers\ndef f(x): return {used}").f)

    helper = "K = 2\nOTHER = open(__import__('os').devnull)\nOTHER.close()\ndef scale(x): return x * K\n"
    first = print_of(helper)
    assert print_of(helper + "def unused(x): pass\n") == first
    assert print_of(helper.replace("K = 2", "K = 3")) != first
    assert print_of(helper.replace("x * K", "x + K")) != first


@pytest.mark.parametrize(
    "body",
    [
        "import helpers\n    return helpers.scale(x)",
        "import helpers as h\n    return h.scale(x)",
        "from helpers import scale\n    return scale(x)",
        "import helpers\n    return (lambda: helpers.scale(x))()",
        "import helpers\n    class A:\n        y = helpers.scale\n    return A.y(x)",
        "class A:\n        import helpers\n        y = helpers.scale\n    return A.y(x)",
    ],
)
def test_imports_inside_a_function_are_followed(load, prints, body):
    def print_of(helper):
        load(helper, "helpers")
        return prints(load(f"def f(x):\n    {body}").f)

    helper = "K = 2\nUNUSED = iter([])\ndef scale(x): return x * K"
    first = print_of(helper)
    assert print_of(helper) == first
    assert print_of(helper.replace("K = 2", "K = 3")) != first


def test_a_module_that_is_handed_on_counts_whole(load, prints):
    def print_of(helper):
        load(helper, "helpers")
        return prints(load("import helpers\ndef f(x, name): return getattr(helpers, name)(x)").f)

    assert print_of("K = 1\ndef scale(x): return x") != print_of("K = 2\ndef scale(x): return x")


def test_a_module_that_answers_for_missing_names_counts_by_how(load, prints):
    def print_of(answer):
        load(f"def __getattr__(name): return {answer}", "helpers")
        return prints(load("import helpers\ndef f(x): return x * helpers.K").f)

    assert print_of(1) == print_of(1) != print_of(2)


def test_a_changed_attribute_of_a_loaded_module_counts(load, prints):
    load("SIZE = 224", "config")
    function = load("import config\ndef f(x): return x * config.SIZE").f
    first = prints(function)
    sys.modules["config"].SIZE = 96
    assert prints(function) != first


def test_tracing_changes_nothing(prints):
    def bright(x):
        if tf.reduce_sum(x) > 0:
            return x * 2
        return -x

    traced = tf.function(bright)
    before = prints(bright), prints(traced)
    traced(tf.ones(3))
    list(tf.data.Dataset.from_tensor_slices(np.ones((2, 3))).map(bright))
    assert (prints(bright), prints(traced)) == before


def test_no_code_of_the_user_runs(prints):
    class Trap:
        def __init__(self):
            object.__setattr__(self, "k", 1)

        def _spring(self, *_):
            raise AssertionError("ran")

        __eq__ = __hash__ = __getattribute__ = __reduce_ex__ = __repr__ = __len__ = __iter__ = __call__ = _spring
        dynamic = property(_spring)

    trap = Trap()
    other = Trap()
    object.__setattr__(other, "k", 2)
    assert prints([trap]) != prints([other])
