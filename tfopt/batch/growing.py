"""Which batch sizes are tried: they double until one does not fit, and the gaps that matter are then halved."""

from collections.abc import Callable

from tfopt.batch.trials import Trial

_FIRST = 8
_AS_GOOD = 0.97  # of the best throughput
_CLOSE_SHARE = 0.01  # of a size: a gap so small, above 800, is not halved
_LONGEST_STEP_MS = 10_000.0
_Try = Callable[[int], Trial]


def on_grid(size: int) -> int:
    """Rounds a batch size down to one that is tried: 1 to 8, and above that the multiples of 8."""
    return size if size <= _FIRST else size - size % _FIRST


def grow(try_size: _Try, most: int | None = None) -> dict[int, Trial]:
    """Tries batch sizes until the largest that fits and the smallest that is as good as the best are known.

    Args:
        try_size: Tries one size.
        most: The largest to try; None: no limit.

    Returns:
        The trials by batch size, in the order they were made.
    """
    if most == 0:
        return {}
    trials: dict[int, Trial] = {}
    fitting, failing = _double(try_size, most, trials)
    while failing is not None and trials[failing].outcome != "hung":  # more of those would take minutes each
        between = _between(fitting, failing)
        if between is None:
            break
        trials[between] = try_size(between)
        fitting, failing = (between, failing) if trials[between].fits else (fitting, between)
    while any(trial.fits for trial in trials.values()):
        chosen = recommended(trials)
        between = _between(max((size for size in trials if size < chosen), default=0), chosen)
        if between is None:
            break
        trials[between] = try_size(between)
    return trials


def recommended(trials: dict[int, Trial]) -> int:
    """The smallest batch size within 3 % of the best throughput; 0 if none fits."""
    rates = {size: trial.examples_per_second for size, trial in trials.items() if trial.examples_per_second is not None}
    best = max(rates.values(), default=0.0)
    return min((size for size, rate in rates.items() if rate >= _AS_GOOD * best), default=0)


def _takes_too_long(trial: Trial, size: int) -> bool:
    """Whether a step on `size` examples would take over 10 s, at the throughput of a trial."""
    rate = trial.examples_per_second
    return rate is not None and 1000 * size / rate > _LONGEST_STEP_MS


def _double(try_size: _Try, most: int | None, trials: dict[int, Trial]) -> tuple[int, int | None]:
    """Doubles the batch size; returns the last that fits, and the one that does not, if any."""
    top = None if most is None else on_grid(most)
    fitting, size = 0, _FIRST if top is None else min(_FIRST, top)
    while True:
        trials[size] = try_size(size)
        if not trials[size].fits:
            return fitting, size
        fitting, size = size, 2 * size if top is None else min(2 * size, top)
        if size == fitting or _takes_too_long(trials[fitting], size):
            return fitting, None


def _between(low: int, high: int) -> int | None:
    """The size halfway between two, on the grid; None if they are close."""
    places = [size if size <= _FIRST else _FIRST - 1 + size // _FIRST for size in (low, high)]
    middle = sum(places) // 2
    if middle in places or high - low <= _CLOSE_SHARE * low:
        return None
    return middle if middle <= _FIRST else _FIRST * (middle - _FIRST + 1)
