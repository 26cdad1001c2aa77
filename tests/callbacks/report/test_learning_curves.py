"""Which curves the page draws of which logs, with figures computed by hand."""

import math
import re

import pytest

from tfopt.callbacks.report.learning_curves import Epoch, curves, lost_since
from tfopt.callbacks.report.timeline import Timeline


def epochs(count, **logs):
    """Each key's value by the epoch's index; of 10 s each."""
    return [
        Epoch(number=at + 1, begin=10.0 * at, end=10.0 * at + 10, logs={key: value(at) for key, value in logs.items()})
        for at in range(count)
    ]


def panels(markup):
    """The titles, texts and paths of each panel."""
    found = []
    for panel in markup.split('<div class="panel">')[1:]:
        title, text = re.search(r"<strong>(.*?)</strong>.*?<b>(.*?)</b>", panel, re.DOTALL).groups()
        lines = re.findall(r'class="line (?:dots )?(line\d|only)" d="(.*?)"', panel)
        found.append((title, text, [(style, path) for style, path in lines if path]))
    return found


def drawn(kept, steps=None, seconds=100.0):
    return curves(kept, steps or Timeline(), seconds=seconds)


def test_training_and_validation_over_epochs():
    kept = epochs(5, accuracy=lambda at: 0.2 * at, loss=lambda at: 4.0 - at, val_loss=lambda at: 4.0 - at / 2)
    markup, left_out = drawn(kept)
    assert panels(markup) == [
        (
            "loss",
            "training 0, validation 2",
            [("line0", "M0 0L500 100 1000 200 1500 300 2000 400"), ("line1", "M0 0L500 50 1000 100 1500 150 2000 200")],
        ),
        ("accuracy", "0.8", [("line0", "M0 400L500 300 1000 200 1500 100 2000 0")]),
    ]
    assert left_out == 0
    assert "epoch\u00a01" in markup
    assert "training</text>" in markup, "labelled where they end"


def test_of_one_long_epoch_the_logs_within_it():
    steps = Timeline()
    for at in range(0, 100, 10):
        steps.add("loss", None, float(at), 2.0 - at / 50)
    markup, _ = drawn(epochs(1, loss=lambda at: 0.25, val_loss=lambda at: 0.5), steps)
    ((title, text, lines),) = panels(markup)
    assert (title, text) == ("loss", "training 0.2, validation 0.5")
    assert lines[0][1].startswith("M0 0L200 40 ")
    assert lines[1] == ("line1", "M200 300L200 300"), "at the end of its epoch, at 10 of 100 s"
    assert ">100\u00a0s<" in markup, "the axis is one of time"
    assert "the mean since the epoch began" in markup
    assert panels(drawn([], steps)[0])[0][1] == "0.2", "before the first epoch has ended"


def test_nothing_to_draw():
    assert drawn([]) is None
    assert drawn(epochs(1, loss=lambda at: 1.0)) is None, "a single value is no curve"
    assert drawn(epochs(9, step_time_ms=lambda at: 1.0, loss=lambda at: "high")) is None


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_loss_that_is_lost(lost):
    kept = epochs(9, loss=lambda at: lost if at > 5 or at == 2 else 1.0, val_loss=lambda at: 1.0)
    assert lost_since("loss", kept, Timeline()) == "epoch 7"
    assert lost_since("val_loss", kept, Timeline()) is None
    assert lost_since("loss", epochs(2, loss=lambda at: None), Timeline()) is None
    assert lost_since("loss", [], Timeline()) is None
    ((_, text, lines),) = panels(drawn(kept)[0])
    assert text == "not a number since epoch 7"
    assert lines[0][1] == "M0 0L250 0M750 0L1000 0 1250 0"


def test_a_loss_that_is_lost_within_an_epoch():
    steps = Timeline()
    for at in range(10):
        steps.add("loss", None, 60.0 * at, 1.0 if at < 4 or at == 5 else None)
        steps.add("accuracy", None, 60.0 * at, 1.0)
    assert lost_since("loss", [], steps).replace("\u00a0", " ") == "6 min after the start"
    assert lost_since("accuracy", [], steps) is None
    (_, text, lines), _ = panels(drawn([], steps, seconds=600.0)[0])
    assert text == "not a number since 6\u00a0min after the start"
    assert lines == [("only", "M0 0L200 0 400 0 600 0"), ("only", "M1000 0L1000 0")]


def test_a_loss_that_falls_by_powers_of_ten():
    kept = epochs(5, loss=lambda at: 10.0 ** (2 - at), accuracy=lambda at: 0.9 + at / 100)
    loss, accuracy = panels(drawn(kept)[0])
    assert loss[2] == [("only", "M0 0L500 100 1000 200 1500 300 2000 400")]
    assert accuracy[2] == [("only", "M0 400L500 300 1000 200 1500 100 2000 0")], "its axis begins at 0.90"


def test_many_metrics_leave_some_to_the_table():
    names = {f"metric{number:02}": lambda at: 0.5 for number in range(30)}
    markup, left_out = drawn(epochs(9, loss=lambda at: 1.0, **names))
    assert ([title for title, *_ in panels(markup)][:2], len(panels(markup)), left_out) == (["loss", "metric00"], 9, 22)


def test_names_with_markup_come_through_as_text():
    markup, _ = drawn(epochs(9, **{"<b>": lambda at: 1.0}))
    assert panels(markup)[0][0] == "&lt;b&gt;"
