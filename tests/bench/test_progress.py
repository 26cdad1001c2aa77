"""What a run says while it measures: the time left, by hand, and lines above the bar."""

import io

import pytest
from rich.console import Console

from tfopt.bench.progress import Progress, duration


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def made(clock, seconds=100.0, at_most=1e9, terminal=False):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    return Progress(seconds, at_most=at_most, clock=clock, console=console)


def test_the_time_left_moves_from_the_start(clock):
    progress = made(clock)
    assert (progress.seconds_left(), progress.share()) == (100.0, 0.0)
    clock.now += 25
    assert (progress.seconds_left(), progress.share()) == (75.0, 0.25)


def test_a_slower_machine_needs_longer(clock):
    progress = made(clock)
    assert progress.plan([40, 60]) == 100
    progress.start("one", 40)
    clock.now += 80  # twice as long as expected
    progress.start("two", 60)
    assert progress.seconds_left() == 120
    clock.now += 30
    assert progress.seconds_left() == 90


def test_a_case_that_takes_longer_than_expected_leaves_some_time(clock):
    progress = made(clock)
    progress.plan([100])
    progress.start("one", 100)
    assert progress.time_left() == "about 2 min left"
    clock.now += 500
    assert progress.seconds_left() == pytest.approx(10)
    assert progress.time_left() == "at least 10 s left"


def test_never_more_than_the_budget_leaves(clock):
    progress = made(clock, at_most=50)
    assert progress.seconds_left() == 50
    clock.now += 60
    assert progress.seconds_left() == 0


def test_without_a_terminal_each_case_has_a_line(clock):
    progress = made(clock)
    with progress:
        progress.plan([40, 60])
        progress.start("stack on photos", 40)
        progress.tick("naive")
        progress.say("a warning [bold] " + 9 * "of seven " + "columns")
    assert progress._console.file.getvalue() == (
        f"stack on photos … about 2 min left\na warning [bold]{7 * ' of seven'}\nof seven of seven columns\n"
    )


def test_on_a_terminal_lines_stand_above_the_bar(clock):
    progress = made(clock, terminal=True)
    with progress:
        progress.plan([100])
        progress.start("stack on photos", 100)
        progress.say("a warning")
        clock.now += 60
        progress.tick("naive")
        progress._bar.refresh()
    shown = progress._console.file.getvalue()
    assert "about 40 s left" in shown
    assert "about 40 s left · stack on photos: naive" in shown
    assert shown.index("a warning") < shown.rindex("stack on photos")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7300, "about 2 h"), (290, "about 5 min"), (61, "about 60 s"), (12, "about 10 s"), (0.1, "about 5 s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
