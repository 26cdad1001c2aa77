import math
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfopt.callbacks import (
    CompilationLogger,
    LossScaleLogger,
    PrometheusExporter,
    ReportWriter,
    StepProfiler,
    ThroughputLogger,
    TrackerLogger,
    UtilizationAlert,
    UtilizationLogger,
)
from tfopt.checks import file, folder, integer, log_folder, number, path

PARTS = r"(?s)Expected {} to be .+\. Received: .+\. [A-Z].+\."
LONG = "x" * 300


class Tracker:
    def log(self, values, step):
        pass


# An argument that takes numbers above 0, those of at least 0 or 1, and those that are integers.
POSITIVE = {
    "below": UtilizationAlert,
    "for_seconds": UtilizationAlert,
    "interval_seconds": UtilizationLogger,
    "flops_per_example": ThroughputLogger,
    "peak_tflops": ThroughputLogger,
}
NUMBERS = [
    *((name, lambda value, name=name, kind=kind: kind(**{name: value})) for name, kind in POSITIVE.items()),
    ("above", lambda value: UtilizationAlert("step_time_ms", above=value)),
    ("interval_seconds", lambda value: TrackerLogger(Tracker(), interval_seconds=value)),
    ("interval_seconds", lambda value: PrometheusExporter(port=0, interval_seconds=value)),
    ("start_after_seconds", lambda value: StepProfiler("logs", start_after_seconds=value)),
]
INTEGERS = [
    ("window_steps", lambda value: ThroughputLogger(window_steps=value)),
    ("max_compilations", CompilationLogger),
    ("start_step", lambda value: StepProfiler("logs", value)),
    ("steps", lambda value: StepProfiler("logs", steps=value)),
    ("port", lambda value: PrometheusExporter(port=value)),
]
PATHS = [
    ("log_dir", UtilizationLogger),
    ("log_dir", ThroughputLogger),
    ("log_dir", LossScaleLogger),
    ("log_dir", StepProfiler),
    ("path", ReportWriter),
    ("textfile", lambda value: PrometheusExporter(value)),
]


def raises(error, name):
    return pytest.raises(error, match=PARTS.format(name))


@pytest.mark.parametrize(("name", "make"), NUMBERS)
def test_numbers(name, make):
    for value in (5, np.float32(5), np.int64(5), Fraction(5, 2)):
        make(value)
    for value in (10**400, -(10**400), math.nan, math.inf, np.float32("nan"), np.float32("inf")):
        with raises(ValueError, name):
            make(value)
    for value in ("5", True, np.True_, [5], 5j, Decimal(5), tf.constant(5.0)):
        with raises(TypeError, name):
            make(value)


@pytest.mark.parametrize(("name", "make"), [one for one in NUMBERS if one[0] not in ("below", "above")])
def test_numbers_that_are_too_low(name, make):
    for value in (-1, *([0, np.float32(0)] if name != "start_after_seconds" else [])):
        with raises(ValueError, name):
            make(value)


@pytest.mark.parametrize(("name", "make"), INTEGERS)
def test_integers(name, make):
    for value in (5, np.int64(5), np.uint8(5)):
        make(value)
    for value in (-1, np.int64(-1), -(10**400), *([0] if name not in ("start_step", "port") else [])):
        with raises(ValueError, name):
            make(value)
    for value in (5.0, np.float32(5), "5", True, np.True_, math.nan, math.inf, [5]):
        with raises(TypeError, name):
            make(value)


@pytest.mark.parametrize(("name", "make"), PATHS)
def test_paths(name, make, tmp_path):
    for value in (3, b"logs", True, ["logs"]):
        with raises(TypeError, name):
            make(value)
    for value in (f"{tmp_path}/{LONG}", Path(f"{LONG}/{LONG}.prom"), "gs://bucket/logs", "a\0b.prom"):
        with raises(ValueError, name) as caught:
            make(value)
        assert len(str(caught.value)) < 300
    with raises(ValueError, name):
        make(tmp_path / "loop" / "a.prom" if not (tmp_path / "loop").symlink_to("loop") else None)


def test_values_are_pythons_own():
    assert type(number("n", np.float32(0.5), "Give one.")) is float
    assert type(integer("n", np.int64(3), "Give one.", least=0)) is int
    assert number("n", 0, "Give one.", least=0) == 0.0


def test_bounds_in_words():
    with pytest.raises(ValueError, match=r"^Expected n to be above 0\. Received: 0\. Give seconds\.$"):
        number("n", 0, "Give seconds.", above=0)
    with pytest.raises(ValueError, match=r"^Expected n to be at least 0\. Received: -1\. Give seconds\.$"):
        number("n", -1, "Give seconds.", least=0)
    with pytest.raises(ValueError, match=r"^Expected n to be from 0 to 65535\. Received: 65536\. Take 0\.$"):
        integer("n", 65536, "Take 0.", least=0, most=65535)
    with pytest.raises(
        ValueError, match=r"^Expected n to be a finite number\. Received: one beyond 1e308\. Give one\.$"
    ):
        number("n", 10**400, "Give one.")


def test_files_and_folders(tmp_path):
    made = tmp_path / "file"
    made.touch()
    assert folder("log_dir", tmp_path, "Name one.") == tmp_path
    assert file("path", str(made), "Name one.") == made
    assert path("path", made / "below", "Name one.") == made / "below"  # fit warns of it, as the file may go till then
    assert log_folder(None) is None
    with pytest.raises(ValueError, match=r"which is a file\. Name one\."):
        folder("log_dir", made, "Name one.")
    for given in (tmp_path, ""):
        with pytest.raises(ValueError, match=r"which is a folder\. Name one\."):
            file("path", given, "Name one.")


def test_a_path_of_ones_own():
    class Own(os.PathLike):
        def __fspath__(self):
            return "logs"

    assert folder("log_dir", Own(), "Name one.") == Path("logs")
