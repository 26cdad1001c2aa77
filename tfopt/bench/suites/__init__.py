"""The suites, by name. A suite is a module here with `cases(scale)`, and a line in `SUMMARIES`.

`cases` lists what the suite measures; it is called in every process of a run, so it must be quick and write nothing.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

from tfopt.errors import unknown_name

# With their summaries, so that `tfopt-bench list` and `--help` need not load TensorFlow.
SUMMARIES = {
    "stack": "from naive Keras to what tfopt recommends: each technique on top of the others, and each alone",
    "precision": "float32 against mixed_bfloat16 and mixed_float16",
    "xla": "the training step with and without XLA",
    "pipeline": "naive and hand-tuned tf.data pipelines against build_pipeline(), with crop and with cache",
    "fit": "fit, stock and overlapped, beside the step alone; on a GPU also fast kernels",
}

# What each takes on two CPU cores, in seconds: the time left of a run is estimated from it.
_SECONDS = {
    "stack": 27,
    "precision": 23,
    "xla": 13,
    "pipeline": 65,
    "fit": 9,
}

# Several suites under a name, as (suite, workload), None for what is left of the suite: what says most comes first,
# should the time run out.
LISTS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "gpu": (
        ("fit", "resnet50"),
        ("fit", "gpt2"),
        ("fit", "mlp"),
        ("stack", None),
        ("pipeline", "resnet50 from JPEG"),
        ("fit", None),  # the kernels
        ("precision", None),
        ("xla", None),
        ("pipeline", None),
    )
}


def expand(names: Sequence[str]) -> list[str]:
    """Returns the suites of these names, each once; for no name all. Loads none.

    Args:
        names: Suites, lists of them, and single cases, such as "stack/photos".

    Raises:
        ValueError: If there is no suite or list of that name.
    """
    return list(dict.fromkeys(suite for suite, _ in _places(names)))


def spell_out(names: Sequence[str]) -> list[str]:
    """Returns names that ask for the same cases in the same order, without lists and without repetitions."""
    return list(dict.fromkeys(f"{suite}/{workload}" if workload else suite for suite, workload in _places(names)))


def seconds(name: str) -> float:
    """Returns about how long a suite takes on two CPU cores."""
    return _SECONDS.get(name, 10.0)


def position(names: Sequence[str], address: tuple[str, str]) -> int | None:
    """Returns the place of a case, given by suite and workload, in the order that these names ask for.

    None if they do not ask for it.
    """
    suite, workload = address
    places = enumerate(_places(names))
    return next((at for at, place in places if place in ((suite, workload), (suite, None))), None)


def _places(names: Sequence[str]) -> list[tuple[str, str | None]]:
    return [place for name in names or SUMMARIES for place in _places_of(name)]


def _places_of(name: str) -> tuple[tuple[str, str | None], ...]:
    if name in LISTS:
        return LISTS[name]
    suite, slash, workload = name.partition("/")
    if suite not in SUMMARIES or (slash and not workload):
        raise unknown_name("suite", name, [*SUMMARIES, *LISTS])
    return ((suite, workload or None),)


def load(name: str) -> ModuleType:
    """Returns a suite's module."""
    return importlib.import_module(f"tfopt.bench.suites.{name}")
