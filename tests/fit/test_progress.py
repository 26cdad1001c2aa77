"""The progress bar: what it prints, how often, and what that costs."""

import re

import keras
import pytest
from fitting import Pair, X, Y, dataset, dense_net

from tfopt import fit
from tfopt.fit.logs import LogDelivery


@pytest.fixture(scope="module")
def pair():
    return Pair()


def shown(text):
    """The last frame of each line, without colours and times."""
    frames = [line.split("\r")[-1] for line in re.sub(r"\x1b\[\d+m|\x08+", "", text).split("\n")]
    lines = [re.sub(r"\d+(s|ms|us)(/step)?", "_", frame.replace("\b", "")).strip() for frame in frames]
    return [line for line in lines if line]


def without_length():
    return dataset(batch=4).filter(lambda *_: True)


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [1, 2])
@pytest.mark.parametrize("data", [lambda: dataset(batch=4), without_length], ids=["ten batches", "unknown"])
def test_what_it_ends_with(pair, capsys, data, verbose):
    def train(model):
        keyword = {"shuffle": False, "validation_data": (X, Y)}
        # The data must not end: there stock fit counts a step too many (D19).
        keyword |= {"steps_per_epoch": 10} if data is without_length else {}
        model.fit(data().repeat(2) if data is without_length else data(), epochs=2, verbose=verbose, **keyword)
        model.evaluate(dataset(), verbose=verbose)
        model.predict(dataset(), verbose=verbose)
        return shown(capsys.readouterr().out)

    lines = pair.train(train)
    assert sum("10/10" in line and "val_loss" in line for line in lines) == 2
    assert any("3/3" in line and "accuracy" in line for line in lines)


def test_it_finds_out_how_many_steps_there_are(capsys):
    model = fit.overlap(dense_net(), log_every=4)
    with pytest.warns(UserWarning, match="ran out of data"):  # Keras', for all data of unknown length
        model.fit(without_length(), epochs=2, shuffle=False)
    assert sum(line.startswith("10/10") for line in shown(capsys.readouterr().out)) == 2


@pytest.mark.slow
def test_logs_are_converted_every_so_many_steps(conversions, capsys, monkeypatch):
    monkeypatch.setattr("tfopt.fit.logs._SECONDS", 1000.0)
    model = dense_net()
    model.fit(dataset(batch=1), shuffle=False)
    stock = conversions()
    fit.overlap(model, log_every=10)
    model.fit(dataset(batch=1), shuffle=False)
    overlapped = conversions() - stock
    model.fit(dataset(batch=1), shuffle=False, verbose=0)
    silent = conversions() - stock - overlapped
    assert stock == 40 + 2  # and at the end of the epoch, and of the training
    assert overlapped == 5 + 2  # steps 1, 11, 21, 31 and 40
    assert silent == 2


@pytest.mark.parametrize("ask", ["evaluate", "predict"])
def test_evaluate_and_predict_convert_at_their_end(conversions, ask):
    model, heard = dense_net(), []
    hear = keras.callbacks.LambdaCallback()
    hear.on_test_batch_end = hear.on_predict_batch_end = lambda batch, logs=None: heard.append(logs)
    counts = []
    for put in (fit.undo, fit.overlap):
        put(model)
        before = conversions()
        getattr(model, ask)(dataset(batch=4), verbose=0, callbacks=[hear])
        counts.append(conversions() - before)
    assert counts == {"evaluate": [10 + 1, 1], "predict": [10, 0]}[ask]
    assert len(heard) == 20


@pytest.mark.parametrize(
    ("seconds", "batches"),
    [(0.0, [0, 10, 20, 24]), (0.3, [0, 4, 8, 12, 16, 20, 24]), (2.0, list(range(25)))],
)
def test_it_moves_after_a_second_on_slow_steps(seconds, batches, set_clock):
    clock = iter(seconds * step for step in range(100))
    set_clock(lambda: next(clock), LogDelivery)
    delivery = LogDelivery(10)
    for _ in range(2):  # epochs
        assert [batch for batch in range(25) if delivery._due(batch, 25)] == batches
