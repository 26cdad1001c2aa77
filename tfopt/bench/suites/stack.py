"""From a first script to what tfopt recommends: each technique on top of the others, and each alone.

On a GPU ResNet-50 and GPT-2. On a CPU, which has no Tensor Cores and gains nothing by XLA, photographs and a small net.
"""

from functools import cache, partial
from typing import Any

import tensorflow as tf

from tfopt import hardware, precision
from tfopt.bench.cases import Case, Scale
from tfopt.bench.suites import feeding
from tfopt.bench.suites.kernels import GPT2_BATCH
from tfopt.bench.suites.techniques import Workload, alone, stacked
from tfopt.bench.workloads import gpt2, photos, resnet50
from tfopt.measure import one_batch
from tfopt.pipelines import build_pipeline

_STEPS, _WARMUP = 12, 6
_PHOTOS_BATCH, _PHOTOS_STEPS = 32, 12
_GPT2_BATCHES = 40  # so that no epoch ends while steps are timed


def cases(scale: Scale) -> list[Case]:
    """The cases for this size, those that say most first, should the time run out."""
    if scale.resnet is None:
        return [stacked(_photos(scale.photos))]
    workloads = [_resnet50(scale.resnet), _gpt2()]
    return [*map(stacked, workloads), *map(alone, workloads)]


def _on_gpu(last: str) -> tuple[str, ...]:
    """The techniques that this GPU has."""
    policy = precision.recommend().policy
    ampere = all(gpu.compute_capability is None or gpu.compute_capability >= (8, 0) for gpu in hardware.gpus())
    in_16_bits = policy != "float32"
    names = ["TF32"] * ampere + [policy] * in_16_bits + ["XLA", "build_pipeline", "overlap"]
    return (*names, *[last] * (last != "flash attention" or (ampere and in_16_bits)))


def _resnet50(batch_size: int) -> Workload:
    rows = cache(partial(feeding.rows, batch_size))
    return Workload(
        name="resnet50",
        techniques=_on_gpu('cache="device"'),
        net=lambda jit_compile: resnet50.model(jit_compile=jit_compile),
        naive=cache(lambda optimised: _naive(rows(), batch_size, optimised)),
        pipeline=cache(lambda kept: build_pipeline(rows(), batch_size=batch_size, cache=kept)),
        batch=lambda: tuple(part[:batch_size] for part in rows()),
        steps=_STEPS,
        warmup=_WARMUP,
        tolerance=None,
    )


def _gpt2() -> Workload:
    rows = cache(partial(gpt2.batch, _GPT2_BATCHES * GPT2_BATCH))
    return Workload(
        name="gpt2",
        techniques=_on_gpu("flash attention"),
        net=lambda jit_compile: gpt2.model(jit_compile=jit_compile),
        naive=cache(lambda optimised: _naive(rows(), GPT2_BATCH, optimised)),
        pipeline=cache(lambda kept: build_pipeline(rows(), batch_size=GPT2_BATCH, cache=kept)),
        batch=lambda: tuple(part[:GPT2_BATCH] for part in rows()),
        steps=_STEPS,
        warmup=_WARMUP,
        tolerance=0.02,
    )


def _photos(count: int) -> Workload:
    folder = cache(partial(photos.folder, count))

    def pipeline(kept: str | None) -> tf.data.Dataset:
        return build_pipeline(folder(), batch_size=_PHOTOS_BATCH, transform=photos.resized, cache=kept)

    return Workload(
        name="photos",
        techniques=("build_pipeline", 'cache="memory"', "overlap"),
        net=lambda jit_compile: photos.model(jit_compile=jit_compile),
        naive=lambda optimised: photos.naive(folder(), _PHOTOS_BATCH, optimised=optimised),
        pipeline=pipeline,
        batch=cache(lambda: one_batch(photos.naive(folder(), _PHOTOS_BATCH))),
        steps=_PHOTOS_STEPS,
        warmup=count // _PHOTOS_BATCH,  # which fills a cache
        tolerance=1e-5,
    )


def _naive(rows: tuple[Any, Any], batch_size: int, optimised: bool) -> tf.data.Dataset:
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(batch_size, drop_remainder=True)
    return dataset if optimised else photos.one_by_one(dataset)
