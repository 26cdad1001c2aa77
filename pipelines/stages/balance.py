"""The stage "balance": how often an epoch reads the examples of each class, and in which order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.elements import apply, element_of
from tfopt.pipelines.shared.epochs import Draw, Position
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import bits_from, in_batches
from tfopt.pipelines.sources.reach import those_with
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages.stage import Stage
from tfopt.text import percent

_CLASSES_SHOWN = 8
_LABELS_AT_ONCE = 1024
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """What an epoch reads of a class."""

    name: str
    members: Any = field(compare=False, repr=False)  # the positions of its examples in the source: int64 (n,)
    taken: int  # examples in an epoch

    @property
    def count(self) -> int:
        """How many examples it has."""
        return len(self.members)

    @property
    def times(self) -> float:
        """How often an epoch reads each of its examples, on average."""
        return self.taken / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance(Stage):
    """Says in which order an epoch reads the examples, so that each batch has the shares of the classes."""

    classes: tuple[Class, ...]

    def order(self, position: Position) -> Any:
        """Returns the positions that are read in the whole epoch of a position: int64 (n,).

        The examples of each class form one stream of permutations, which the epochs cut: so over the epochs, each is
        read as often as the others. In an epoch the examples of each class lie at even distances.
        """
        # The first ones spread over this distance, neighbours in size far apart, so that rounding evens out.
        ranks = np.argsort(np.argsort([each.taken for each in self.classes], kind="stable"))
        starts = (ranks * _GOLDEN + bits_from(0, 1, Draw("mix").key(position)) / 2**32) % 1
        times = [(np.arange(each.taken) + start) / each.taken for each, start in zip(self.classes, starts, strict=True)]
        drawn = [_drawn(each, number, position) for number, each in enumerate(self.classes)]
        order: Any = np.concatenate(drawn)[np.argsort(np.concatenate(times), kind="stable")]
        return order

    def summary(self) -> dict[str, Any]:
        """Returns how many examples each class has, and how many an epoch reads."""
        return {
            "balance": {each.name: {"examples": each.count, "examples_per_epoch": each.taken} for each in self.classes}
        }


def _drawn(each: Class, number: int, position: Position) -> Any:
    """Returns the positions of a class's examples that an epoch reads, in random order."""
    size, first = each.count, position.epoch * each.taken
    whole, rest = divmod(first, size)
    readings = -(-(rest + each.taken) // size)
    key = Draw("files", lasts=True, mixed=number).key(position)
    bits = bits_from(whole * size, readings * size, key).reshape(readings, size)
    return each.members[np.argsort(bits, axis=1, kind="stable").ravel()[rest : rest + each.taken]]


def plan_balance(options: PipelineOptions, facts: Facts) -> tuple[Balance, ...]:
    """Returns the stage "balance", if it was asked for.

    Raises:
        PipelineError: If a class has no examples, or too small a share of an epoch.
        UnsupportedError: If the source cannot be read by position, or several processes divide it.
        ValueError: If examples have no labels of classes, or other classes than the shares.
    """
    if options.balance is None:
        return ()
    source, count = facts.source, facts.count
    if facts.part is not None:
        raise UnsupportedError(
            f"Expected one process for balance={options.balance!r}. Found {facts.part.parts}, each with a part of "
            f"{source.name} in which classes may be missing. What to do: pass class_weight to fit, or mix a source of "
            "each class."
        )
    if source.at is None or not count:
        raise UnsupportedError(
            f"Expected a source that can be read by position for balance={options.balance!r}. Found: {source.name}. "
            f"What to do: mix a source of each class, or pass {those_with('position')}."
        )
    values, numbers = np.unique(_labels(source, facts.traced.decoded.element_spec), return_inverse=True)
    names = [_name(source, value) for value in values.tolist()]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Expected a name of its own for each class, for `balance`. Found {len(names):,} classes in {source.name}, "
            f"several of which share a name of {_in_short(dict.fromkeys(names))}. Pass class numbers as labels."
        )
    shares = _shares(options.balance, dict(zip(names, values.tolist(), strict=True)))
    members = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
    drops = facts.last_batch[0] == "drop"
    read = count - count % options.batch_size if drops else count  # what is left out would be missed again
    taken = _divided(read, shares)
    classes = tuple(
        Class(name=name, members=at, taken=number)
        for name, at, number in zip(names, members, taken, strict=True)
        if number
    )
    if missing := [name for name, share, number in zip(names, shares, taken, strict=True) if share and not number]:
        raise PipelineError(
            f"Expected an example or more of each class in an epoch of {read:,}. Found none of {_in_short(missing)}, "
            "whose shares are too small. Pass larger ones, or 0 to leave a class out."
        )
    return (_stage(classes, read, alike=options.balance == "classes"),)


def _stage(classes: tuple[Class, ...], read: int, *, alike: bool) -> Balance:
    """Returns the stage, which names all classes or those whose examples are read least and most often."""
    few, among = classes, ""
    if len(classes) > _CLASSES_SHOWN:
        ordered = sorted(classes, key=lambda each: each.times)
        few, among = (ordered[0], ordered[-1]), f" (the extremes of {len(classes):,} classes)"
    setting = ", ".join(f"{each.name} {percent(each.taken / read)}" for each in few) + among
    often = ", ".join(f"{each.times:.3g} of {each.name}" for each in few)
    return Balance(
        name="balance",
        setting=f"{len(classes):,} classes alike" if alike else setting,
        reason=f"reads of each example an epoch: {often}{among}; equal within a class over the epochs",
        classes=classes,
    )


def _in_short(names: Iterable[str]) -> str:
    """Lists the first names of classes, of which there may be thousands."""
    first = list(names)
    return ", ".join(first[:_CLASSES_SHOWN]) + (", …" if len(first) > _CLASSES_SHOWN else "")


def _labels(source: Source, spec: Any) -> Any:
    """Reads the labels of all examples, before `transform`: (n,)."""
    label = spec[1] if isinstance(spec, tuple) and len(spec) > 1 else None
    if not isinstance(label, tf.TensorSpec) or label.shape.rank is None or label.shape.num_elements() != 1:
        raise ValueError(
            f"Expected examples (x, label) with one number or text as label for `balance`. Found {spec} in "
            f"{source.name}. Pass class numbers as labels, such as y.argmax(-1) of vectors, which `transform` may make "
            "again."
        )
    raw = source.dataset()
    decode = source.decode
    if source.decode_batch is not None:
        raw, decode = in_batches(raw, _LABELS_AT_ONCE, full=False), source.decode_batch

    def labelled(*element: Any) -> Any:
        given = element_of(element, raw.element_spec)
        return tf.reshape((given if decode is None else apply(decode, given))[1], [-1])

    # TensorFlow computes nothing of an example that its label does not need.
    found = raw.map(labelled, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    found = found if source.decode_batch is not None else found.batch(_LABELS_AT_ONCE)
    labels: Any = np.concatenate([labels.ravel() for labels in found.as_numpy_iterator()])
    if label.dtype.is_floating and not np.array_equal(labels, np.floor(labels)):
        at = int(np.flatnonzero(labels != np.floor(labels))[0])
        raise ValueError(
            f"Expected labels of classes for `balance`. Found {labels[at]} in example {at:,} of {source.name}. Leave "
            "it out where labels are quantities."
        )
    return labels


def _name(source: Source, value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    names = source.class_names or ()
    if isinstance(value, float):
        return f"{value:.0f}"
    return names[value] if not isinstance(value, bool) and 0 <= value < len(names) else str(value)


def _shares(asked: Any, values: Mapping[str, Any]) -> list[float]:
    """Returns the share of each class, in the order of their labels; `values` has their labels by name."""
    if asked == "classes":
        return [1 / len(values)] * len(values)
    given = {}
    for key, share in asked.items():
        found = [name for name, value in values.items() if key in (name, value)]
        if not found:
            raise ValueError(
                f"Expected shares of the classes {_in_short(values)} for `balance`. Found {key!r}. Pass names or "
                "labels of these."
            )
        if found[0] in given:
            raise ValueError(f"Expected one share of {found[0]!r} for `balance`. Found two, by name and by label.")
        given[found[0]] = share
    if left := [name for name in values if name not in given]:
        raise ValueError(
            f"Expected a share of each class for `balance`. Found none of {_in_short(left)}. Pass 0 to leave one out."
        )
    whole = sum(given.values())
    return [given[name] / whole for name in values]


def _divided(count: int, shares: list[float]) -> list[int]:
    """Divides a number by shares into whole ones, which differ from them by less than one."""
    exact = np.array(shares) * count
    whole = np.floor(exact).astype(np.int64)
    nearest = np.argsort(whole - exact, kind="stable")[: count - int(whole.sum())]
    whole[nearest] += 1
    return [int(each) for each in whole]
