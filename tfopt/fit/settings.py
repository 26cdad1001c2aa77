"""What is known of a model that is overlapped."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import keras

from tfopt.fit.in_flight import InFlight
from tfopt.fit.readers import Readers

NAME = "_tfopt_overlap"
"""The attribute of the model. Set in its `__dict__`: Keras tracks what is set as an attribute."""


@dataclass(slots=True, eq=False, kw_only=True)
class Overlap:
    """The overlap of one model.

    Attributes:
        log_every: Steps from one update of the progress bar to the next.
        in_flight: The bound on steps launched.
        readers: What is known of the callbacks that fits and evaluations of this model run with.
        overrides: What was put into the model's `__dict__`, by name.
    """

    log_every: int
    in_flight: InFlight
    readers: "weakref.WeakKeyDictionary[keras.callbacks.CallbackList, Readers]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    overrides: dict[str, Any] = field(default_factory=dict)


def overlap_of(model: Any) -> Overlap | None:
    """The overlap of a model, None where there is none."""
    return getattr(model, "__dict__", {}).get(NAME)
