"""Small trainings that show a defect, or where none shows: what `tfopt.internals.probing` measures.

Each is right by arithmetic. They train stock Keras unless the caller has installed a repair.
"""

from typing import Any

from tfopt.internals.probing import Probe

_HOME = "tfopt.repairs.catalogue"


def on_one_device(constant: str, measure: str, right: Any, tolerance: float = 0.0, *, refuses: bool = False) -> Probe:
    """A probe of the repair of this name in the catalogue, by a function of `one_device`."""
    module = f"{__name__}.one_device"
    return Probe(
        home=f"{_HOME}:{constant}",
        harmless=f"{module}:fitted",
        measure=f"{module}:{measure}",
        right=right,
        tolerance=tolerance,
        refuses=refuses,
    )


def on_replicas(constant: str, measure: str, right: Any, tolerance: float = 1e-6, *, refuses: bool = False) -> Probe:
    """A probe of the repair of this name in the catalogue, by a function of `replicas`."""
    module = f"{__name__}.replicas"
    return Probe(
        home=f"{_HOME}:{constant}",
        harmless=f"{module}:fitted",
        measure=f"{module}:{measure}",
        right=right,
        tolerance=tolerance,
        refuses=refuses,
        devices=2,
    )


def equal(home: str, harmless: str, *, devices: int = 1) -> Probe:
    """A probe of a patch that must change no number, by a function of a module here."""
    return Probe(home=home, harmless=f"{__name__}.{harmless}", devices=devices)
