"""The key of a cache on disk: a hash of everything its content depends on.

Change anything below, and another cache is written; whatever is missing here would serve stale examples.
"""

import hashlib
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.choice import CacheChoice, reads_by_position
from tfopt.pipelines.cache.fingerprint import fingerprint
from tfopt.pipelines.cache.folder import FORMAT
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.crop_elements import crop_example
from tfopt.pipelines.shared.nondeterminism import CHANGING
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import part_seed


def cache_key(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> str:
    """Returns the key: "tfopt-" and a SHA-256.

    Raises ValueError if the source or a function cannot be fingerprinted, and there is no `cache_key` in its place.
    """
    source, sample = facts.source, facts.sample
    if source.fingerprint is None and options.cache_key is None:
        raise ValueError(
            "Expected a source whose data can be fingerprinted, for a cache on disk. This one has no `fingerprint`. "
            "Pass cache_key='…', a text that you change whenever the data change, or a Source with fingerprint=."
        )
    data = "cache_key" if source.fingerprint is None else _fingerprint("source", source.fingerprint(), options)
    crop = (
        None
        if options.crop is None or options.crop.random
        else partial(crop_example, crop=options.crop, crop_with=options.crops_with)
    )
    by_position = reads_by_position(options, facts)
    order = [part_seed(options.seed or 0, "mix"), by_position] if options.shuffle else None
    decode = [source.encoded if crop and source.encoded else source.decode]
    if source.decode_batch is not source.decode:
        decode.append(source.decode_batch)
    parts: list[Any] = [
        ("format", FORMAT),
        ("TensorFlow", tf.__version__),
        ("spec", sample.example_spec if cache.after == "transform" else sample.decoded_spec),
        ("sample", sample.digest),
        ("order", order),
        ("count", facts.count),
        ("remainder", options.batch_size if options.remainder == "drop" and not options.shuffle else None),
        ("crop", _fingerprint("crop", crop, options)),
        ("key", options.cache_key),
        ("source", data),
        ("decode", _fingerprint("decode", decode, options)),
    ]
    if facts.part is not None:
        part = facts.part
        chosen = [part.chosen] if part.chosen else []  # else the key is that of earlier versions
        parts.append(("part", [part.index, part.parts, part.block, part.size, part.batches, *chosen]))
    if cache.after == "transform":
        transform = options.transformation
        called = None if transform is None else [transform.by_batch, transform.call]
        parts.append(("transform", _fingerprint("transform", called, options)))
    return "tfopt-" + hashlib.sha256(repr(parts).encode()).hexdigest()


def expect_one_order(facts: Facts) -> None:
    """Refuses a source whose order changes: an epoch that goes on where a damaged cache ends would lose examples."""
    for found in facts.in_source:
        if found.kind in CHANGING:
            raise ValueError(
                f"Expected a source with one order for a cache on disk. It holds {found}: an epoch that goes on where "
                'a damaged cache ends would lose examples. Take it out, or pass cache="memory".'
            )


def _fingerprint(name: str, value: Any, options: PipelineOptions) -> str:
    """Returns the fingerprint of a part; if it has none, `cache_key` stands for it."""
    try:
        return fingerprint(value, name=name)
    except ValueError:
        if options.cache_key is None:
            raise
        return "cache_key"
