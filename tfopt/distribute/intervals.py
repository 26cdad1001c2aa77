"""How long the watchdogs wait for what."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self

from tfopt.errors import ClusterError

PREFIX = "TFOPT_WATCH_"


@dataclass(frozen=True, slots=True)
class Intervals:
    """The times after which a watchdog acts, in seconds.

    The sum of those that follow each other stays below 90 s: the longest way is deaf, then leave or kill.

    Attributes:
        beat_seconds: Between two signs of life.
        silent_seconds: Without a word from another watchdog before it counts as lost.
        stopped_seconds: That a training process may be stopped (SIGSTOP, Ctrl-Z).
        deaf_seconds: Without a sign of life from a training process before it counts as hung.
        leave_seconds: That the others get to end by themselves after a worker that ended on purpose, though with an
            exit code, as on Ctrl-C: they may be about to write a checkpoint.
        kill_seconds: That a training process gets to end before it is killed.
        linger_seconds: That a watchdog stays after its training process, until the others have heard of it.
    """

    beat_seconds: float = 2.0
    silent_seconds: float = 20.0
    stopped_seconds: float = 20.0
    deaf_seconds: float = 45.0
    leave_seconds: float = 30.0
    kill_seconds: float = 5.0
    linger_seconds: float = 2.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Reads TFOPT_WATCH_DEAF_SECONDS and the like; a variable that is not set leaves the default.

        Raises:
            ClusterError: A variable is no positive number.
        """
        names = {field.name: PREFIX + field.name.upper() for field in fields(cls)}
        return cls(**{name: _seconds(key, environ[key]) for name, key in names.items() if key in environ})

    def to_dict(self) -> dict[str, float]:
        """The fields as JSON values."""
        return asdict(self)


def _seconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ClusterError(
            f"Expected {key} to be a positive number of seconds. Found: {text!r}. What to do: correct or unset it."
        )
    return value
