"""Names a cache on disk after everything that its content depends on."""

import dataclasses
import hashlib
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.fingerprint import fingerprint
from tfopt.pipelines.cache.writer import FORMAT
from tfopt.pipelines.caching import CacheChoice
from tfopt.pipelines.cropped import crop_example
from tfopt.pipelines.sampling import Sample, Traced
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import part_seed
from tfopt.pipelines.sources.source import Source


def with_key(
    source: Source, options: PipelineOptions, cache: CacheChoice, traced: Traced, sample: Sample, *, count: int | None
) -> tuple[CacheChoice, str | None]:
    """Returns the cache with the name of its content, None for a cache that is on no disk.

    With cache="auto", what cannot be fingerprinted is not cached, and the choice says why.

    Raises:
        ValueError: A cache in a folder was asked for, and its content cannot be fingerprinted or has no fixed order.
    """
    if cache.folder is None:
        return cache, None
    try:
        _expect_one_order(traced)
        return cache, cache_key(source, options, cache, sample, count)
    except ValueError as error:
        if options.cache_folder is not None:
            raise
        return dataclasses.replace(cache, on=None, reason=f"{cache.reason}, but: {error}"), None


def _expect_one_order(traced: Traced) -> None:
    for found in traced.in_source:
        if found.kind in ("random", "assigning", "shuffle", "unordered"):
            raise ValueError(
                f"Expected a source with one order for a cache on disk. It holds {found}: an epoch that goes on where "
                'a damaged cache ends would lose examples. Take it out, or pass cache="memory".'
            )


def cache_key(source: Source, options: PipelineOptions, cache: CacheChoice, sample: Sample, count: int | None) -> str:
    """Returns the name of what a cache holds.

    Args:
        source: The source.
        options: The pipeline's options.
        cache: Where it stands.
        sample: What the sampled elements showed.
        count: How many examples there are, None where unknown.

    Raises:
        ValueError: The source or a function cannot be fingerprinted.
    """
    crop = None if options.crop is None or options.crop.random else partial(crop_example, crop=options.crop)
    order = part_seed(options.seed or 0, "mix") if options.shuffle else None
    parts: list[Any] = [
        ("format", FORMAT),
        ("TensorFlow", tf.__version__),
        ("spec", sample.example_spec if cache.after == "transform" else sample.decoded_spec),
        ("sample", sample.digest),
        ("order", order),
        ("count", count),
        ("remainder", options.batch_size if options.remainder == "drop" and not options.shuffle else None),
        ("crop", _print("crop", crop, options)),
        ("key", options.cache_key),
        (
            "source",
            _print("source", source.fingerprint and source.fingerprint(), options, missing=not source.fingerprint),
        ),
        ("decode", _print("decode", source.encoded if crop and source.encoded else source.decode, options)),
    ]
    if cache.after == "transform":
        parts.append(("transform", _print("transform", options.transform, options)))
    return "tfopt-" + hashlib.sha256(repr(parts).encode()).hexdigest()


def _print(name: str, value: Any, options: PipelineOptions, *, missing: bool = False) -> str:
    """The fingerprint of a part; where it has none, `cache_key` stands for it."""
    try:
        if missing:
            raise ValueError(
                "Expected a source whose data can be fingerprinted, for a cache on disk. This one has no "
                "`fingerprint`. Pass cache_key='…', a text that you change whenever the data change, or a Source with "
                "fingerprint=."
            )
        return fingerprint(value, name=name)
    except ValueError:
        if options.cache_key is None:
            raise
        return "cache_key"
