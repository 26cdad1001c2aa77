"""The suites, by name. The module of each has `cases(scale)`; the other modules hold cases of several.

What a suite compares stands in `SUMMARIES`, a line each.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

from tfopt.errors import unknown_name

# With their summaries, so that `tfopt-bench list` and `--help` need not load TensorFlow.
SUMMARIES = {
    "precision": "float32 against mixed_bfloat16 and mixed_float16",
    "xla": "the training step with and without XLA",
    "pipeline": "naive and hand-tuned tf.data pipelines against build_pipeline(), with crop and with cache",
    "fit": "fit, stock and overlapped, beside the step alone; on a GPU also fast kernels",
    "callbacks": "fit with and without tfopt's callbacks",
    "distribute": "two processes under bare tf.distribute and under tfopt's strategy(), beside one; and all GPUs",
}


def check(names: Sequence[str]) -> None:
    """Raises a ValueError for a name that is no suite's, without loading any."""
    for name in names:
        if name not in SUMMARIES:
            raise unknown_name("suite", name, SUMMARIES)


def load(names: Sequence[str]) -> list[ModuleType]:
    """The suites' modules, in the order asked for; all of them where none is named.

    Raises:
        ValueError: There is no suite of that name.
    """
    check(names)
    return [importlib.import_module(f"tfopt.bench.suites.{name}") for name in dict.fromkeys(names) or SUMMARIES]
