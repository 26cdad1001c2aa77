"""The suites, by name. The module of each has `cases(scale)`; the other modules hold cases of several.

What a suite compares stands in `SUMMARIES`, a line each.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

from tfopt.errors import unknown_name

# With their summaries, so that `tfopt-bench list` and `--help` need not load TensorFlow.
SUMMARIES = {
    "stack": "from a first script to what tfopt recommends: each technique on top of the others, and each alone",
    "precision": "float32 against mixed_bfloat16 and mixed_float16",
    "xla": "the training step with and without XLA",
    "pipeline": "naive and hand-tuned tf.data pipelines against build_pipeline(), with crop and with cache",
    "fit": "fit, stock and overlapped, beside the step alone; on a GPU also fast kernels",
    "callbacks": "fit with and without tfopt's callbacks",
    "distribute": "two processes under bare tf.distribute and under tfopt's strategy(), beside one; and all GPUs",
}


# Several suites under a name, those that say most first, should the time run out.
LISTS = {"gpu": ("stack", "fit", "precision", "pipeline", "callbacks", "xla", "distribute")}


def expand(names: Sequence[str]) -> list[str]:
    """The suites of these names and lists, each once; all of them where none is named. Loads none.

    Raises:
        ValueError: There is no suite or list of that name.
    """
    for name in names:
        if name not in SUMMARIES and name not in LISTS:
            raise unknown_name("suite", name, [*SUMMARIES, *LISTS])
    listed = [suite for name in names for suite in LISTS.get(name, (name,))]
    return list(dict.fromkeys(listed or SUMMARIES))


def load(names: Sequence[str]) -> list[ModuleType]:
    """The suites' modules, in the order asked for.

    Raises:
        ValueError: There is no suite or list of that name.
    """
    return [importlib.import_module(f"tfopt.bench.suites.{name}") for name in expand(names)]
