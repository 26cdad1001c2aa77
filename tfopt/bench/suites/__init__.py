"""The suites, by name. A suite is a module here with `cases(scale)`, and a line in `SUMMARIES`.

`cases` lists what the suite measures; it is called in every process of a run, so it must be quick and write nothing.
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
    "memory": "GPT-2's step with activations recomputed and with its loss in pieces: memory and time",
    "batch": "accumulated batches beside a large one, and the batch size that tfopt.batch.find recommends",
    "cost": "convolutions, dense layers and attention beside cheaper forms: which train faster here",
    "compress": "nets pruned and distilled beside the whole ones, accuracy included, and inference in integers",
    "checkpoint": "saving a training and restoring it, with TrainingCheckpoint and with what TensorFlow and Keras have",
    "callbacks": "fit with and without tfopt's callbacks",
    "distribute": "several processes: a step, its optimizer state, skipped synchronisation, input; and all GPUs",
}

# Run only by name: they take so long that the others would lose most of their five minutes.
BY_NAME = ("memory", "batch", "cost", "compress", "checkpoint")

# What each takes on two CPU cores, in seconds: the time left of a run is estimated from it.
_SECONDS = {
    "stack": 27,
    "precision": 23,
    "xla": 13,
    "pipeline": 65,
    "fit": 9,
    "memory": 60,
    "batch": 70,
    "cost": 30,
    "compress": 500,
    "checkpoint": 440,
    "callbacks": 15,
    "distribute": 85,
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
        ("memory", None),
        ("batch", None),
        ("precision", None),
        ("compress", None),
        ("cost", None),
        ("xla", None),
        ("callbacks", None),
        ("pipeline", None),
        ("distribute", None),
        ("checkpoint", None),
    )
}


def expand(names: Sequence[str]) -> list[str]:
    """Returns the suites of these names and lists, each once; for no name all but `BY_NAME`. Loads none.

    Raises:
        ValueError: If there is no suite or list of that name.
    """
    return list(dict.fromkeys(suite for suite, _ in _places(names)))


def seconds(name: str) -> float:
    """Returns about how long a suite takes on two CPU cores."""
    return _SECONDS.get(name, 10.0)


def position(names: Sequence[str], address: tuple[str, str]) -> int:
    """Returns the place of a case, given by suite and workload, in the order that these names ask for."""
    suite, workload = address
    places = _places(names)
    return next(at for at, place in enumerate(places) if place in ((suite, workload), (suite, None)))


def _places(names: Sequence[str]) -> list[tuple[str, str | None]]:
    for name in names:
        if name not in SUMMARIES and name not in LISTS:
            raise unknown_name("suite", name, [*SUMMARIES, *LISTS])
    wanted = names or [name for name in SUMMARIES if name not in BY_NAME]
    return [place for name in wanted for place in LISTS.get(name, ((name, None),))]


def load(name: str) -> ModuleType:
    """Returns a suite's module."""
    return importlib.import_module(f"tfopt.bench.suites.{name}")
