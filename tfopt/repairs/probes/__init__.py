"""Small trainings that show a defect, or where none shows: what `tfopt.internals.probing` measures.

Each is right by arithmetic. They train stock Keras unless the caller has installed a repair.
"""

from typing import Any

from tfopt.internals.probe import Probe

_HOME = "tfopt.repairs.catalogue"


def on_one_device(constant: str, measure: str, right: Any, tolerance: float = 0.0, *, refuses: bool = False) -> Probe:
    """A probe of the repair of this name in the catalogue, by a function of `one_device`."""
    return _probe("one_device", constant, measure, right=right, tolerance=tolerance, refuses=refuses)


def on_replicas(constant: str, measure: str, right: Any, tolerance: float = 1e-6, *, refuses: bool = False) -> Probe:
    """A probe of the repair of this name in the catalogue, by a function of `replicas`."""
    return _probe("replicas", constant, measure, right=right, tolerance=tolerance, refuses=refuses, devices=2)


def _probe(module: str, constant: str, measure: str, **options: Any) -> Probe:
    place = f"{__name__}.{module}"
    return Probe(home=f"{_HOME}:{constant}", harmless=f"{place}:fitted", measure=f"{place}:{measure}", **options)


def in_workers(home: str, measure: str, right: Any, *, refuses: bool = False) -> Probe:
    """A probe of a patch that acts in several processes, by a function of `workers`."""
    place = f"{__name__}.workers"
    harmless, measure = f"{place}:fitted", f"{place}:{measure}"
    trains = f"{_HOME}:MULTI_WORKER"  # without which Keras cannot train there
    return Probe(
        home=home, harmless=harmless, measure=measure, right=right, refuses=refuses, workers=2, throughout=trains
    )


def equal(home: str) -> Probe:
    """A probe of a patch that must change no number of a training."""
    return Probe(home=home, harmless=f"{__name__}.one_device:fitted")
