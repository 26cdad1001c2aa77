"""Several variants measured in turn, so that a machine whose speed drifts treats them alike."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tfopt.measure.times import StepTimes


def interleave(
    variants: Mapping[str, Callable[[], StepTimes]],
    repeats: int = 5,
    *,
    on_progress: Callable[[str, int], None] | None = None,
) -> dict[str, StepTimes]:
    """Measures each variant in turn, A B A B …, in this process.

    Args:
        variants: By name, a callable that measures once. A `StepTimer` or `FitTimer` compiles on its first call only.
        repeats: Turns. Six or more make the interval of `compare` a full 95 % one; five cover 94 %.
        on_progress: Called with a variant's name and the turn (0, 1, …) after each measurement.

    Returns:
        By name, the samples of all turns, kept apart by turn.

    Raises:
        ValueError: No variant, or `repeats` below 1.

    Example:
        >>> times = tfopt.measure.interleave({"off": StepTimer(plain, data), "on": StepTimer(jitted, data)})
        >>> print(tfopt.measure.compare(times["off"], times["on"]))
        1.83× (95 %: 1.79–1.88), faster
    """
    if not variants or repeats < 1:
        raise ValueError(
            f"Expected at least one variant and one repeat. Received: {len(variants)} variants, repeats={repeats}."
        )
    turns: dict[str, list[StepTimes]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name, measure in variants.items():
            turns[name].append(measure())
            if on_progress:
                on_progress(name, turn)
    return {
        name: replace(times[0], repeats_ms=tuple(repeat for part in times for repeat in part.repeats_ms))
        for name, times in turns.items()
    }
