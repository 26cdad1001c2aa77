"""The key of a cache on disk: a hash of everything its content depends on.

Change anything below, and another cache is written; whatever is missing here would serve stale examples.
"""

import hashlib
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.choice import CacheChoice, reads_by_position
from tfopt.pipelines.cache.folder import FORMAT
from tfopt.pipelines.cache.graph_hash import hash_graph
from tfopt.pipelines.cache.value_hash import hash_value
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.nondeterminism import CHANGING
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import part_seed


def cache_key(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> str:
    """Returns the key: "tfopt-" and a SHA-256.

    The functions are those that `facts` holds, as they were traced.

    Raises ValueError if the source has no fingerprint, or what a function depends on is not in its graph, and there is
    no `cache_key` in its place.
    """
    source, sample = facts.source, facts.sample
    if source.fingerprint is None and options.cache_key is None:
        raise ValueError(
            "Expected a source whose data can be fingerprinted, for a cache on disk. This one has no `fingerprint`. "
            "Pass cache_key='…', a text that you change whenever the data change, or a Source with fingerprint=."
        )
    data = "cache_key" if source.fingerprint is None else _of_values(source.fingerprint(), options)
    # What is read by position lies in the source's own order, however it is shuffled.
    mixed = options.shuffle and not reads_by_position(options, facts)
    cropped = options.crop is not None and not options.crop.random
    stages = ["decode", *["crop"] * cropped, *["transform"] * (cache.after == "transform")]
    parts: list[Any] = [
        ("format", FORMAT),
        ("TensorFlow", tf.__version__),
        ("spec", sample.example_spec if cache.after == "transform" else sample.decoded_spec),
        ("sample", sample.digest),
        ("order", part_seed(options.seed or 0, "mix") if mixed else None),
        ("count", facts.count),
        ("remainder", options.batch_size if options.remainder == "drop" and not options.shuffle else None),
        ("key", options.cache_key),
        ("source", data),
        *((stage, _of_functions(stage, facts.traced.functions[stage], options)) for stage in stages),
    ]
    if cache.after == "transform" and options.transformation is not None:
        parts.append(("by batch", options.transformation.by_batch))  # kernels may round otherwise
    if facts.part is not None:
        part = facts.part
        parts.append(("part", [part.index, part.parts, part.block, part.size, part.batches, part.chosen]))
    return "tfopt-" + hashlib.sha256(repr(parts).encode()).hexdigest()


def expect_one_order(facts: Facts) -> None:
    """Refuses a source whose order changes: an epoch that goes on where a damaged cache ends would lose examples."""
    for found in facts.in_source:
        if found.kind in CHANGING:
            raise ValueError(
                f"Expected a source with one order for a cache on disk. It holds {found}: an epoch that goes on where "
                'a damaged cache ends would lose examples. Take it out, or pass cache="memory".'
            )


def _of_values(value: Any, options: PipelineOptions) -> str:
    """Returns the fingerprint of a source; if it has none, `cache_key` stands for it."""
    try:
        return hash_value(value, name="source")
    except ValueError:
        if options.cache_key is None:
            raise
        return "cache_key"


def _of_functions(stage: str, functions: list[Any], options: PipelineOptions) -> list[str]:
    """Returns the hashes of traced functions; `cache_key` stands for whatever these do not show."""
    hashes = []
    for function in functions:
        # Which files a source reads is in its fingerprint.
        known, unseen = hash_graph(function, reads_files=stage != "transform")
        if unseen and options.cache_key is None:
            raise ValueError(
                f"Expected functions whose results follow from their graph, for a cache on disk. {stage!r} holds "
                f"{unseen[0]}: a change of that would go unnoticed. Pass cache_key='…', a text that you change "
                "whenever the result would change."
            )
        hashes.append(known)
    return hashes
