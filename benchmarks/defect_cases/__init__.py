"""What a case of benchmarks/defects.py is: a figure that shows a defect, its right value, and how it is measured."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt import repairs
from tfopt.errors import TfoptError

STOCK, TFOPT = "stock", "tfopt"


@dataclass(frozen=True, slots=True)
class Case:
    """A figure that shows a defect."""

    defect: str
    """Its number in docs/repairs.md."""

    figure: str
    """What is measured."""

    right: float | str
    """What it should be, by arithmetic."""

    measure: Callable[[bool, Path], float | str]
    """Measures it: with tfopt (True) or in stock Keras (False), in an empty folder."""

    tolerance: float = 0.0
    """By how much a number may differ from the right one."""

    handled: bool = True
    """Whether tfopt does anything about it; if not, only stock Keras is measured."""

    def verdict(self, value: float | str) -> str:
        """Returns "right" or "wrong"."""
        if isinstance(value, str) or isinstance(self.right, str):
            return "right" if value == self.right else "wrong"
        return "right" if abs(value - self.right) <= self.tolerance else "wrong"


class RefusedError(Exception):
    """tfopt reports the defect without raising an error of its own."""


def run(send: Callable[[Any], None], case: Case, with_tfopt: bool, folder: Path) -> dict[str, Any]:
    """Measures a case in this process: the value and its verdict, or what refused it, or the error that ended it."""
    try:
        value = case.measure(with_tfopt, folder)
        found = {"verdict": case.verdict(value), "value": value}
    except (TfoptError, RefusedError) as error:
        message = str(error).replace(str(folder), "FOLDER").replace(f"{Path(__file__).parents[2]}/", "")
        found = {"verdict": "refused", "message": message}
    except Exception as error:  # noqa: BLE001  a defect may show as an error
        found = {"verdict": "failed", "message": f"{type(error).__name__}: {error}"}
    if not with_tfopt and any(repair.installed for repair in repairs.REPAIRS.values()):
        raise AssertionError("A repair is installed in what should be stock Keras.")
    return found


def repaired(with_tfopt: bool, folder: Path, name: str, measure: Callable[[], float | str]) -> float | str:
    """What a probe measures, with a repair installed or in stock Keras."""
    if with_tfopt:
        repairs.install(name)
    return measure()


def forked(function: Callable[..., Any], *arguments: Any) -> int:
    """Calls a function in a fork of this process, where TensorFlow must not have run yet; returns its exit code.

    It is 0, or 1 if the function raised, or the negative number of the signal that killed it.
    """
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(60)
    process.kill()
    process.join()
    return process.exitcode
