"""`build_pipeline()` against naive and hand-tuned tf.data pipelines on JPEGs, and whether the data are the same.

On a GPU also ResNet-50, fed from them.
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.bench.cases import REPEATS, Case, Scale, Timer, Variant
from tfopt.bench.drawing import DrawTimer
from tfopt.bench.judging import same_values
from tfopt.bench.suites import jpeg
from tfopt.bench.workloads import crops, photos
from tfopt.measure import FitTimer
from tfopt.model.batches import repeated
from tfopt.pipelines import CentralCrop, RandomCrop, build_pipeline, images, plan_pipeline, profile_pipeline

_Make = Callable[[], tf.data.Dataset]
_BATCH = 32
_STEPS = 16
_SAMPLES = 2
_TIMES = 8  # the photographs over, so that no epoch ends while the input alone is timed
_ALONE = f"batch of {_BATCH}, input alone"


def cases(scale: Scale) -> list[Case]:
    """The cases for this size."""
    folder = photos.folder(scale.photos)
    # A cache is full after one pass, which is what the warm-up makes.
    warmup = scale.photos // _BATCH
    from_jpeg = [jpeg.case(folder, scale.resnet)] if scale.resnet else []
    return [*from_jpeg, _fit(folder, warmup), _crop(folder), _by_hand(folder), _cache(folder, warmup)]


def _fit(folder: Path, warmup: int) -> Case:
    variants: dict[str, tuple[str, _Make]] = {
        "naive": (
            "one file after the other, nothing ahead of time",
            partial(photos.naive, folder, _BATCH, optimised=False),
        ),
        "tf.data defaults": (
            "the same script with the optimisations that tf.data makes by itself",
            partial(photos.naive, folder, _BATCH),
        ),
        "build_pipeline": ("parallel, prefetched, decoded in every epoch", partial(_resized, folder, None)),
        "build_pipeline with cache": ("the same, decoded once and kept in memory", partial(_resized, folder, "memory")),
    }
    return Case(
        suite="pipeline",
        workload="photos",
        question="What does the input pipeline do to fit on JPEG files?",
        unit="step of fit",
        variants=[
            Variant(name=name, note=note, timer=partial(_fit_timer, make, warmup), values=partial(_contents, make))
            for name, (note, make) in variants.items()
        ],
        judge=same_values("every image and label of one pass, in any order", "same images"),
    )


def _crop(folder: Path) -> Case:
    # Random crops are never the same: the central ones of the same code are compared.
    return Case(
        suite="pipeline",
        workload="photos, random crop",
        question="How fast does the input alone come, with a random crop of each JPEG?",
        unit=_ALONE,
        variants=[
            Variant(
                name="naive crop",
                note="decoded whole, then cropped, one file after the other",
                timer=partial(_timer, partial(crops.naive, folder, _BATCH, times=_TIMES), 4),
                values=partial(_contents, partial(crops.naive, folder, _BATCH, central=True)),
            ),
            Variant(
                name="build_pipeline, crop",
                note="crop=RandomCrop(224)",
                timer=partial(_timer, partial(_cropped, folder, RandomCrop(photos.SIZE), _TIMES), 4),
                values=partial(_contents, partial(_cropped, folder, CentralCrop(photos.SIZE), 1)),
            ),
        ],
        judge=same_values("every image and label of one pass with a central crop instead", "same images"),
        profile=partial(_profile, folder),
    )


def _by_hand(folder: Path) -> Case:
    """Unchecked: TensorFlow's fused decoding, used plainly, is off at the sides of most crops."""
    variants: dict[str, tuple[str, _Make]] = {
        "hand-tuned tf.data": (
            "only the crop is decoded, in parallel, ahead and in any order",
            partial(crops.hand_tuned, folder, _BATCH, times=_TIMES),
        ),
        "build_pipeline, crop": ("crop=RandomCrop(224)", partial(_cropped, folder, RandomCrop(photos.SIZE), _TIMES)),
    }
    return Case(
        suite="pipeline",
        workload="photos, by hand",
        question="How does it compare to the fastest that is written by hand?",
        unit=_ALONE,
        variants=[
            Variant(name=name, note=note, timer=partial(_timer, make, 4)) for name, (note, make) in variants.items()
        ],
        repeats=2 * REPEATS,  # a difference of a fiftieth is looked for
    )


def _cache(folder: Path, warmup: int) -> Case:
    variants: dict[str, tuple[str, str | None, int]] = {
        "decoded each time": ("cache=None", None, 4),
        "cache in memory": ('cache="memory"', "memory", warmup),
        "cache on disk": ("cache=FOLDER, every record checked as it is read", "disk", warmup),
    }
    return Case(
        suite="pipeline",
        workload="photos, cache",
        question="How fast does the input alone come from a cache?",
        unit=_ALONE,
        variants=[
            Variant(
                name=name,
                note=note,
                timer=partial(_cache_timer, folder, cache, skipped),
                values=partial(_cache_contents, folder, cache),
            )
            for name, (note, cache, skipped) in variants.items()
        ],
        judge=same_values("every image and label of one pass, in any order", "same images"),
    )


def _resized(folder: Path, cache: str | None) -> tf.data.Dataset:
    return build_pipeline(folder, batch_size=_BATCH, transform=photos.resized, cache=cache)


def _cropped(folder: Path, crop: RandomCrop | CentralCrop, times: int) -> tf.data.Dataset:
    once = images(folder)
    over = replace(once, dataset=lambda: once.dataset().repeat(times), count=times * (once.count or 0))
    return build_pipeline(over, batch_size=_BATCH, crop=crop, cache=None)


def _profile(folder: Path) -> dict[str, Any]:
    plan = plan_pipeline(folder, batch_size=_BATCH, crop=RandomCrop(photos.SIZE), cache=None)
    # A results file names no folder.
    return profile_pipeline(plan, seconds=3).to_dict() | {"name": "photos, random crop"}


def _fit_timer(make: _Make, warmup: int, stack: ExitStack) -> Timer:
    return partial(FitTimer(photos.model(), make()), _STEPS, warmup=warmup, samples=_SAMPLES)


def _timer(make: _Make, warmup: int, stack: ExitStack) -> Timer:
    dataset = repeated(make())
    return partial(DrawTimer(lambda: dataset, _BATCH), _STEPS, warmup=warmup, samples=_SAMPLES)


def _cache_timer(folder: Path, cache: str | None, warmup: int, stack: ExitStack) -> Timer:
    where = stack.enter_context(tempfile.TemporaryDirectory()) if cache == "disk" else cache
    return _timer(partial(_resized, folder, where), warmup, stack)


def _cache_contents(folder: Path, cache: str | None) -> Sequence[float]:
    """Of the second pass, the first that comes from the cache."""
    with tempfile.TemporaryDirectory() as temporary:
        dataset = _resized(folder, temporary if cache == "disk" else cache)
        for _ in dataset:
            pass
        return _contents(lambda: dataset)


def _contents(make: _Make) -> Sequence[float]:
    """A number for each example of one pass, sorted: equal for equal images with equal labels."""
    digests = []
    for image, label in make().unbatch().as_numpy_iterator():
        digest = hashlib.sha256(image.tobytes() + bytes([label])).digest()
        digests.append(float(int.from_bytes(digest[:6])))
    return sorted(digests)
