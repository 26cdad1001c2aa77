"""Divides a source's examples into those to train on and those to validate on."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.sources.shapes import some_of
from tfopt.pipelines.sources.source import Source, expect_lasting


def take_split(source: Source, split: float, *, training: bool) -> Source:
    """Returns the share `split` of a source, drawn at random, or what is left of it for training.

    The split depends only on the number of examples, so both calls agree whatever their other options.

    Raises:
        PipelineError: If the number of examples is unknown, or either part would be empty.
        UnsupportedError: If the examples may be others the next time, or come several times.
    """
    expect_lasting(source, "each time, for `split`")
    count = source.count if source.count is not None else int(source.dataset().cardinality())
    if count < 0:
        raise PipelineError(
            f"Expected a known number of examples for split={split}. Found: {source.name}, whose number is unknown or "
            "endless. What to do: apply tf.data.experimental.assert_cardinality(number), or give your own Source a "
            "`count`."
        )
    _expect_each_once(source)
    kept = round(split * count)
    if not 0 < kept < count:
        raise PipelineError(
            f"Expected `split` to leave examples for training and for validation. Found: split={split} of the {count} "
            f"in {source.name}, which is {kept}. What to do: pass another `split`, or more examples."
        )
    order = np.random.RandomState(0).permutation(count)  # the same in each version of NumPy
    chosen = np.sort(order[kept:] if training else order[:kept])
    part = _only(source, chosen, count)
    kind, other = ("train", "validate") if training else ("validate", "train")
    note = f"split={split}: {len(chosen):,} of {count:,} to {kind} on; training={not training} has those to {other} on"
    checked = None if source.checked is None else lambda on_bad_file: made  # that of the source would give all of it
    made: Source = replace(part, note="; ".join(filter(None, (source.note, note))), checked=checked)
    return made


def _expect_each_once(source: Source) -> None:
    stage = source.dataset()
    while len(inputs := stage._inputs()) == 1:
        if type(stage).__name__ == "_RepeatDataset" and int(stage._count) not in (0, 1):
            raise UnsupportedError(
                f"Expected each example once for `split`. Found Dataset.repeat in {source.name}: copies of one example "
                "would be in both parts. What to do: take it out; each iteration of the pipeline reads all examples."
            )
        stage = inputs[0]


def _only(source: Source, chosen: Any, count: int) -> Source:
    """Returns the elements at ascending positions."""
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        places = tf.constant(chosen, tf.int64)
        is_chosen = tf.constant(np.isin(np.arange(count), chosen))
    fingerprint, files, packed = source.fingerprint, source.files, source.packed
    divides = source.part is not None and source.at is not None
    return replace(
        some_of(source, len(chosen), partial(tf.gather, places), partial(tf.gather, is_chosen)),
        fingerprint=None if fingerprint is None else lambda: [fingerprint(), chosen],
        files=None if files is None else tuple(files[number] for number in chosen),
        part=(lambda index, parts: _only(source, chosen[index::parts], count)) if divides else None,
        packed=None if packed is None else lambda size, some: packed(size, chosen[some]),
    )
