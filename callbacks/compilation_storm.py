"""Compilations that do not end, and what to do about them."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from tfopt.xla.log.compilations import Compilation, sizes

_FIXED_BATCH = (
    'Give every batch the same size: build_pipeline(..., remainder="drop"), or "pad", or '
    "dataset.batch(n, drop_remainder=True)."
)
_FIXED_SIZES = (
    "Give it one shape: pad to a fixed length or size, or sort into a few (tf.data.Dataset.bucket_by_sequence_length "
    "with pad_to_bucket_boundary=True, and max_compilations set to how many there are)."
)
_FIXED_DTYPE = "Cast it to one dtype in the dataset."
_SAME_SHAPES = (
    "Its shapes stay the same: pass numbers that change as tensors, and make no tf.function inside the training loop."
)


def storm(events: Iterable[Compilation], limit: int) -> str | None:
    """Says in three parts what is compiled again and again, and the remedy; None if nothing is.

    Args:
        events: The compilations of one training.
        limit: How many of one function are in order.
    """
    functions: dict[tuple[str, tuple[str, ...]], list[Compilation]] = defaultdict(list)
    for event in events:
        functions[event.function, event.variables].append(event)
    most = max(functions.values(), key=len, default=[])
    if len(most) <= limit:
        return None
    known = [event.seconds for event in most if event.seconds is not None]
    seconds = f" in {sum(known):.3g} s" if known else ""
    number = _culprit(most)
    last = next((event for event in reversed(most) if number in event.changed), most[-1])
    return (
        f"Expected at most {limit} XLA compilations of {last.function} in one training. Found {len(most)}{seconds}, "
        f"again and again for {last.cause}. {_remedy(most, number)}"
    )


def _culprit(events: list[Compilation]) -> int | None:
    """The input that changed most often; the first of several."""
    counts = Counter(number for event in events for number in event.changed)
    return max(sorted(counts), key=lambda number: counts[number], default=None)


def _remedy(events: list[Compilation], number: int | None) -> str:
    if number is None:
        return _SAME_SHAPES
    texts = [event.inputs[number] for event in events if number in event.inputs]
    shapes = {sizes(text) for text in texts}
    if len(shapes) == 1:
        return _FIXED_DTYPE
    same_but_first = len({shape[1:] for shape in shapes}) == 1
    return f"Input {number} is to blame. {_FIXED_BATCH if same_but_first else _FIXED_SIZES}"
