"""A naive tf.data pipeline against `build_pipeline()`: fit on JPEG files, and whether the data are the same."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import tensorflow as tf

from tfopt.bench.cases import Case, Scale, Timer, Variant, same_values
from tfopt.bench.workloads import photos
from tfopt.measure import FitTimer
from tfopt.pipelines import build_pipeline

_Make = Callable[[Path, int], tf.data.Dataset]
_BATCH = 32
_STEPS = 20
_SAMPLES = 2


def cases(scale: Scale) -> list[Case]:
    """The cases for this size."""
    folder = photos.folder(scale.photos)
    # The cache is full after one pass, which is what the warm-up makes.
    passes = scale.photos // _BATCH
    variants: dict[str, tuple[str, _Make]] = {
        "naive": ("one file after the other, nothing ahead of time", partial(photos.naive, optimised=False)),
        "tf.data defaults": ("the same script with the optimisations that tf.data makes by itself", photos.naive),
        "build_pipeline": ("parallel, prefetched, decoded in every epoch", partial(_built, cache=None)),
        "build_pipeline with cache": ("the same, decoded once and kept in memory", partial(_built, cache="memory")),
    }
    return [
        Case(
            suite="pipeline",
            workload="photos",
            question="What does the input pipeline do to fit on JPEG files?",
            unit="step of fit",
            variants=[
                Variant(
                    name=name,
                    note=note,
                    timer=partial(_timer, make, folder, passes),
                    values=partial(_contents, make, folder),
                )
                for name, (note, make) in variants.items()
            ],
            judge=same_values("every image and label of one pass, in any order", "same images"),
        )
    ]


def _built(folder: Path, batch_size: int, *, cache: Literal["memory"] | None) -> tf.data.Dataset:
    return build_pipeline(folder, batch_size=batch_size, transform=photos.resized, cache=cache)


def _timer(make: _Make, folder: Path, warmup: int, stack: ExitStack) -> Timer:
    return partial(FitTimer(photos.model(), make(folder, _BATCH)), _STEPS, warmup=warmup, samples=_SAMPLES)


def _contents(make: _Make, folder: Path) -> Sequence[float]:
    """A number for each example of one pass, sorted: equal for equal images with equal labels."""
    digests = []
    for image, label in make(folder, _BATCH).unbatch().as_numpy_iterator():
        digest = hashlib.sha256(image.tobytes() + bytes([label])).digest()
        digests.append(float(int.from_bytes(digest[:6])))
    return sorted(digests)
