"""benchmarks/planted.py and programs.py: docs/diagnosis.md shows what they recorded."""

import harness
import planted
import programs
import pytest


@pytest.mark.parametrize("script", [planted, programs])
def test_the_page_shows_the_record(script):
    page = script.PAGE.read_text(encoding="utf-8")
    found = script.recorded()
    assert found
    assert harness.filled(page, script.__name__, script.table(found)) == page


def row(predicted, before, after, *, at_most=False):
    cause = {"name": "input", "counts": True, "at_most": at_most}
    return {
        "cause": "input",
        "predicted": predicted,
        "seconds": {"as it is": before, "mended": after},
        "diagnosis": {"causes": [cause]},
    }


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (row(2.0, [2.0, 2.2, 9.0], [1.0, 1.0, 1.0]), "within 20 %"),
        (row(2.0, [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]), "further off"),
        (row(2.0, [0.9, 0.9, 0.9], [1.0, 1.0, 1.0]), "wrong side of 1"),
        (row(None, [2.0], [1.0]), "not found"),
        (row(9.0, [2.0], [1.0], at_most=True), "within the bound"),
        (row(1.5, [2.0], [1.0], at_most=True), "beyond the bound"),
    ],
)
def test_predictions_are_judged_by_the_gain(found, verdict):
    assert planted.verdict(found) == verdict
