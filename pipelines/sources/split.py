"""Divides a source's examples into those to train on and those to validate on."""

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.seeding import renumbered, sequence
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
    """Returns the elements at ascending positions; without `at`, all raw elements are read for it."""
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        places = tf.constant(chosen, tf.int64)
        is_chosen = tf.constant(np.isin(np.arange(count), chosen))

    @without_autograph
    def place(number: Any) -> Any:
        return tf.gather(places, number)

    @without_autograph
    def belongs(number: Any, element: Any) -> Any:
        del element
        return tf.gather(is_chosen, number)

    @without_autograph
    def alone(number: Any, element: Any) -> Any:
        del number
        return element

    at = source.at
    fingerprint, part, files, packed = source.fingerprint, source.part, source.files, source.packed
    own = replace(
        source,
        dataset=lambda: source.dataset().enumerate().filter(belongs).map(alone),
        count=len(chosen),
        sample=None,
        shuffled=None,
        pools=None,
        part=None,
        checked=None,
        fingerprint=None if fingerprint is None else lambda: [fingerprint(), chosen],
        files=None if files is None else tuple(files[number] for number in chosen),
        packed=None if packed is None else lambda size, some: packed(size, chosen[some]),
    )
    if at is None:
        return own

    def read(positions: Any) -> Any:
        return at(renumbered(positions, place))

    def spread(limit: int) -> Any:
        step = -(-len(chosen) // limit)
        return read(tf.data.Dataset.range(0, len(chosen), step))

    def divided(index: int, parts: int) -> Source:
        return _only(source, chosen[index::parts], count)

    return replace(
        own,
        dataset=lambda: read(sequence(len(chosen))),
        at=read,
        sample=spread,
        part=None if part is None else divided,
    )
