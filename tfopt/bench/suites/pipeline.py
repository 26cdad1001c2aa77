"""`build_pipeline()` against naive and hand-tuned tf.data pipelines on JPEGs, and whether the data are the same.

On a GPU also ResNet-50, fed from them.
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt import fit, precision
from tfopt.bench.cases import REPEATS, Case, DrawTimer, Scale, Timer, Variant, same_values
from tfopt.bench.workloads import photos
from tfopt.measure import FitTimer, StepTimer
from tfopt.model.batches import repeated
from tfopt.pipelines import CentralCrop, RandomCrop, Source, build_pipeline, images, plan_pipeline, profile_pipeline

_Folder = Callable[[], Path]
"""The photographs, written to disk on first use: listing a run must write none."""
_Make = Callable[[], tf.data.Dataset]
_BATCH = 32
_STEPS = 16
_SAMPLES = 2
_RESNET_STEPS, _RESNET_WARMUP = 20, 8
_TIMES = 8  # the photographs over, so that no epoch ends while steps are timed
_ALONE = f"batch of {_BATCH}, input alone"


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    folder = cache(partial(photos.folder, scale.photos))
    # One pass, after which a cache is full.
    warmup = scale.photos // _BATCH
    from_jpeg = [_resnet50_case(folder, scale.resnet)] if scale.resnet else []
    return [*from_jpeg, _fit(folder, warmup), _crop(folder), _by_hand(folder), _cache_case(folder, warmup)]


def _fit(folder: _Folder, warmup: int) -> Case:
    variants: dict[str, tuple[str, _Make]] = {
        "naive": (
            "one file after the other, nothing ahead of time",
            lambda: photos.naive(folder(), _BATCH, optimised=False),
        ),
        "tf.data defaults": (
            "the same script with the optimisations that tf.data makes by itself",
            lambda: photos.naive(folder(), _BATCH),
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


def _crop(folder: _Folder) -> Case:
    # Random crops never repeat: central crops by the same code are compared.
    return Case(
        suite="pipeline",
        workload="photos, random crop",
        question="How fast is the input alone, with a random crop of each JPEG?",
        unit=_ALONE,
        variants=[
            Variant(
                name="naive crop",
                note="decoded whole, then cropped, one file after the other",
                timer=partial(_timer, lambda: photos.naive_crops(folder(), _BATCH, times=_TIMES), 4),
                values=partial(_contents, lambda: photos.naive_crops(folder(), _BATCH, central=True)),
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


def _by_hand(folder: _Folder) -> Case:
    """Unchecked: TensorFlow's fused decoding, used plainly, is off at the sides of most crops."""
    variants: dict[str, tuple[str, _Make]] = {
        "hand-tuned tf.data": (
            "only the crop is decoded, in parallel, ahead and in any order",
            lambda: photos.hand_tuned_crops(folder(), _BATCH, times=_TIMES),
        ),
        "build_pipeline, crop": ("crop=RandomCrop(224)", partial(_cropped, folder, RandomCrop(photos.SIZE), _TIMES)),
    }
    return Case(
        suite="pipeline",
        workload="photos, by hand",
        question="How does it compare with the fastest pipeline written by hand?",
        unit=_ALONE,
        variants=[
            Variant(name=name, note=note, timer=partial(_timer, make, 4)) for name, (note, make) in variants.items()
        ],
        repeats=2 * REPEATS,  # a difference of a fiftieth is looked for
    )


def _cache_case(folder: _Folder, warmup: int) -> Case:
    variants: dict[str, tuple[str, str | None, int]] = {
        "decoded each time": ("cache=None", None, 4),
        "cache in memory": ('cache="memory"', "memory", warmup),
        "cache on disk": ("cache=FOLDER, every record checked as it is read", "disk", warmup),
    }
    return Case(
        suite="pipeline",
        workload="photos, cache",
        question="How fast is the input alone from a cache?",
        unit=_ALONE,
        variants=[
            Variant(
                name=name,
                note=note,
                timer=partial(_cache_timer, folder, kept, skipped),
                values=partial(_cache_contents, folder, kept),
            )
            for name, (note, kept, skipped) in variants.items()
        ],
        judge=same_values("every image and label of one pass, in any order", "same images"),
    )


def _resized(folder: _Folder, kept: str | None) -> tf.data.Dataset:
    return build_pipeline(folder(), batch_size=_BATCH, transform=photos.resized, cache=kept)


def _cropped(folder: _Folder, crop: RandomCrop | CentralCrop, times: int) -> tf.data.Dataset:
    return build_pipeline(_repeated(folder, times), batch_size=_BATCH, crop=crop, cache=None)


def _repeated(folder: _Folder, times: int) -> Source:
    once = images(folder())
    return replace(once, dataset=lambda: once.dataset().repeat(times), at=None, count=times * (once.count or 0))


def _profile(folder: _Folder) -> dict[str, Any]:
    plan = plan_pipeline(folder(), batch_size=_BATCH, crop=RandomCrop(photos.SIZE), cache=None)
    # A results file names no folder.
    return profile_pipeline(plan, seconds=3).to_dict() | {"name": "photos, random crop"}


def _fit_timer(make: _Make, warmup: int, stack: ExitStack) -> Timer:
    return partial(FitTimer(photos.small_net(), make()), _STEPS, warmup=warmup, samples=_SAMPLES)


def _timer(make: _Make, warmup: int, stack: ExitStack, *, batch_size: int = _BATCH, steps: int = _STEPS) -> Timer:
    dataset = repeated(make())
    return partial(DrawTimer(lambda: dataset, batch_size), steps, warmup=warmup, samples=_SAMPLES)


def _cache_timer(folder: _Folder, kept: str | None, warmup: int, stack: ExitStack) -> Timer:
    where = stack.enter_context(tempfile.TemporaryDirectory()) if kept == "disk" else kept
    return _timer(partial(_resized, folder, where), warmup, stack)


def _cache_contents(folder: _Folder, kept: str | None) -> Sequence[float]:
    """Contents of the second pass, the first that comes from the cache."""
    with tempfile.TemporaryDirectory() as temporary:
        dataset = _resized(folder, temporary if kept == "disk" else kept)
        for _ in dataset:
            pass
        return _contents(lambda: dataset)


def _contents(make: _Make) -> Sequence[float]:
    """Returns a number for each example of one pass, sorted: equal for equal images with equal labels."""
    digests = []
    for image, label in make().unbatch().as_numpy_iterator():
        digest = hashlib.sha256(image.tobytes() + bytes([label])).digest()
        digests.append(float(int.from_bytes(digest[:6])))
    return sorted(digests)


def _resnet50_case(folder: _Folder, batch_size: int) -> Case:
    """A first script's input, `build_pipeline` under overlapped `fit`, and both ceilings."""
    naive = cache(lambda: photos.naive_crops(folder(), batch_size, times=_TIMES))
    pipeline = cache(partial(_on_device, folder, batch_size, "auto"))
    on_host = cache(partial(_on_device, folder, batch_size, None))
    batch = cache(lambda: next(iter(on_host())))
    policy = precision.recommend().policy
    dtype = policy.removeprefix("mixed_")
    ways: dict[str, tuple[str, Callable[[ExitStack], Timer]]] = {
        "naive input": (
            "decoded whole, cropped, one file after the other",
            partial(_resnet_fit_timer, policy, naive, False),
        ),
        "build_pipeline, overlap": (
            "goal: 0.9 of the step alone's speed, or 0.95 of the input alone's",
            partial(_resnet_fit_timer, policy, pipeline, True),
        ),
        "step alone": ("a ceiling: one batch, on the device", partial(_resnet_step_timer, policy, batch)),
        "input alone": (
            "a ceiling: what the CPUs decode, drawn and thrown away",
            partial(_timer, on_host, _RESNET_WARMUP, batch_size=batch_size, steps=_RESNET_STEPS),
        ),
    }
    return Case(
        suite="pipeline",
        workload="resnet50 from JPEG",
        question=f"Does the input keep up with ResNet-50 ({policy}, XLA), with a random crop of each JPEG?",
        unit="step",
        variants=[
            Variant(
                name=name,
                note=note,
                timer=timer,
                ceiling=name.endswith("alone"),
                recommended=name == "build_pipeline, overlap",
                dtype=None if name == "input alone" else dtype,
            )
            for name, (note, timer) in ways.items()
        ],
        model=photos.resnet50,
    )


def _on_device(folder: _Folder, batch_size: int, device: str | None) -> tf.data.Dataset:
    crop = RandomCrop(photos.SIZE)
    return build_pipeline(_repeated(folder, _TIMES), batch_size=batch_size, crop=crop, cache=None, device=device)


def _net(policy: str) -> Any:
    with precision.policy(policy):
        return photos.resnet50(jit_compile=True)


def _resnet_fit_timer(policy: str, make: _Make, overlapped: bool, stack: ExitStack) -> Timer:
    net = _net(policy)
    if overlapped:
        fit.overlap(net)
        stack.callback(fit.undo, net)
    return partial(FitTimer(net, make()), _RESNET_STEPS, warmup=_RESNET_WARMUP, samples=_SAMPLES)


def _resnet_step_timer(policy: str, batch: Callable[[], Any], stack: ExitStack) -> Timer:
    return partial(StepTimer(_net(policy), batch()), _RESNET_STEPS, warmup=1, samples=_SAMPLES)
