"""What fit's progress bar prints of the loggers' figures, which history and later loggers get whole."""

import csv
import re

import keras
import numpy as np
import pytest

import tfopt
from tfopt.callbacks import ThroughputLogger, UtilizationLogger

EVERY = {"step_time_ms", "step_time_p95_ms", "examples_per_second", "input_wait_percent", "eta_seconds"}


def fit(capsys, callbacks, *, overlapped=False, **options):
    """Trains two epochs; returns the history and the lines with figures."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    if overlapped:
        tfopt.fit.overlap(model)
    data = np.zeros((64, 4), "float32"), np.zeros((64, 1), "float32")
    capsys.readouterr()
    history = model.fit(*data, epochs=2, batch_size=8, verbose=2, callbacks=callbacks, **options).history
    return history, [line for line in capsys.readouterr().out.splitlines() if "loss" in line]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_chosen_few_are_printed_and_all_are_kept(capsys, tmp_path, overlapped):
    log = tmp_path / "log.csv"
    loggers = [UtilizationLogger(), ThroughputLogger(), keras.callbacks.CSVLogger(log)]
    history, lines = fit(capsys, loggers, overlapped=overlapped)
    assert history.keys() >= EVERY
    assert len(lines) == 2
    for line in lines:
        assert len(line) < 120
        assert "examples_per_second" in line
        assert "host_" not in line
        assert not any(key in line for key in EVERY - {"examples_per_second", "input_wait_percent"})
    shown = [float(re.search(r"examples_per_second: (\S+)", line)[1]) for line in lines]
    assert shown == [
        float(f"{value:.0f}" if value >= 1000 else f"{value:.4g}") for value in history["examples_per_second"]
    ]
    assert shown != history["examples_per_second"]
    first, _ = csv.DictReader(log.read_text().splitlines())
    assert first.keys() >= EVERY


@pytest.mark.slow
def test_others_can_be_chosen(capsys):
    _, lines = fit(capsys, [ThroughputLogger(show=["step_time_p99_ms"])])
    assert all("step_time_p99_ms" in line and "examples_per_second" not in line for line in lines)
    _, lines = fit(capsys, [ThroughputLogger(show=())], validation_split=0.5)
    assert all("examples_per_second" not in line and "val_loss" in line for line in lines)
    _, lines = fit(capsys, [ThroughputLogger(show=None)])
    assert all(key in line for line in lines for key in EVERY)
    figures = [float(figure) for line in lines for figure in re.findall(r"_\w+: (\S+)", line)]
    assert figures == [float(f"{figure:.0f}" if figure >= 1000 else f"{figure:.4g}") for figure in figures]


def test_a_progress_bar_of_ones_own(capsys):
    bar = keras.callbacks.ProgbarLogger()
    for _ in range(2):
        _, lines = fit(capsys, [ThroughputLogger(), bar])
        assert all("step_time_ms" not in line for line in lines)


@pytest.mark.parametrize(
    ("show", "error", "found"),
    [
        ("examples_per_second", TypeError, r"Pass \['examples_per_second'\]"),
        (["example_per_second"], ValueError, "Did you mean 'examples_per_second'"),
    ],
)
def test_wrong_keys(show, error, found):
    with pytest.raises(error, match=found):
        ThroughputLogger(show=show)
    with pytest.raises(error):
        UtilizationLogger(show=show)
