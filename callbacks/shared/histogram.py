"""How often values of each size occurred, in memory that does not grow with their number."""

import math

import numpy as np
import numpy.typing as npt

# Each bucket begins this many times above the one before.
_RATIO = 1.01
# Seconds: a microsecond to eleven days. What lies beyond goes into the first or last bucket.
_LEAST, _MOST = 1e-6, 1e6
_BUCKETS = 1 + math.ceil(math.log(_MOST / _LEAST) / math.log(_RATIO))


class Histogram:
    """Counts positive values in buckets 1 % wide, so that percentiles of any number of them take 45 kB.

    One thread may add values while another reads.

    Example:
        >>> steps = Histogram()
        >>> steps.add([0.01, 0.01, 0.01, 0.05])
        >>> steps.percentiles(50, 100)
        [0.01, 0.05]
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self._sums = np.zeros(_BUCKETS)

    def add(self, values: npt.ArrayLike, times: npt.ArrayLike = 1) -> None:
        """Adds values, each as many times as it occurred."""
        found = np.asarray(values, float)
        buckets = _bucket(found)
        np.add.at(self._counts, buckets, times)
        np.add.at(self._sums, buckets, found * times)

    @property
    def count(self) -> int:
        """How many values were added."""
        return int(self._counts.sum())

    @property
    def total(self) -> float:
        """The sum of the values."""
        return float(self._sums.sum())

    def percentiles(self, *percents: float) -> list[float]:
        """Returns percentiles, each within 1 % of what `numpy.percentile` returns for all values.

        Raises:
            ValueError: If there are no values.
        """
        counts, means = self._known()
        if not len(counts):
            raise ValueError("Expected values to take percentiles of. Found none. Add one first.")
        ends = np.cumsum(counts)
        ranks = np.array(percents) / 100 * (ends[-1] - 1)
        below, above = (means[np.searchsorted(ends, rank, side="right")] for rank in (np.floor(ranks), np.ceil(ranks)))
        found: list[float] = (below + (ranks - np.floor(ranks)) * (above - below)).tolist()
        return found

    def counts_up_to(self, bounds: npt.ArrayLike) -> list[int]:
        """Returns how many values are at most each bound; those up to 1 % above it may be among them.

        A count never decreases, as Prometheus demands.
        """
        found: list[int] = np.cumsum(self._counts)[_bucket(np.asarray(bounds, float))].tolist()
        return found

    def _known(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The number and the mean of the values in each bucket that has some, in increasing order."""
        counts = self._counts.copy()
        known = counts > 0
        return counts[known], self._sums[known] / counts[known]


def _bucket(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The place of the bucket that holds each value."""
    return (np.log(np.clip(values, _LEAST, _MOST) / _LEAST) / math.log(_RATIO)).astype(np.int64)
