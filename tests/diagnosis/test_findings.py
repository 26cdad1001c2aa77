import json
from dataclasses import replace

import pytest
from diagnoses import cause, diagnosis, times

from tfopt.diagnosis import Diagnosis, NotTested
from tfopt.measure import Comparison


def test_a_cause_counts_if_its_interval_lies_above_0_and_it_takes_3_percent():
    assert cause("input", 3.0, (0.1, 8.0)).counts
    assert not cause("input", 2.9, (2.8, 3.0)).counts
    assert not cause("input", 9.0, (0.0, 18.0)).counts


def test_the_causes_worth_changing_come_most_expensive_first():
    found = diagnosis(cause("a", 4.0), cause("b", 1.0), cause("c", 40.0))
    assert [each.name for each in found.worth_changing] == ["c", "a"]


def test_what_the_causes_leave_is_unexplained():
    assert diagnosis(cause("a", 40.0), cause("b", 1.0), floor=50.0).unexplained_ms == pytest.approx(10.0)
    assert diagnosis(cause("a", 40.0), cause("b", 30.0), floor=50.0).unexplained_ms == pytest.approx(-20.0)
    assert diagnosis(floor=50.0).floor_ms == 50.0


def test_too_noisy_is_what_may_take_3_percent_but_does_not_count():
    sure, noisy, small = cause("a", 40.0), cause("b", 2.0, (-1.0, 3.1)), cause("c", 2.0, (1.0, 2.9))
    assert diagnosis(sure, noisy, small).too_noisy == (noisy,)


VERDICTS = {
    "The most expensive cause: a, 40 ms of a 100 ms step (40 %).": diagnosis(cause("a", 40.0), cause("b", 10.0)),
    "The most expensive causes, too close to tell apart: a (40 ms of a 100 ms step), b (34 ms).": diagnosis(
        cause("a", 40.0, (35.0, 45.0)), cause("b", 34.0, (32.0, 36.0)), cause("c", 10.0)
    ),
    # However uncertain the first is, one of less than half of it is no rival.
    "The most expensive cause: a, 80 ms of a 100 ms step (80 %).": diagnosis(
        cause("a", 80.0, (5.0, 110.0)), cause("b", 34.0)
    ),
    "Nothing here is worth changing: 97 % of a step is the computation itself.": diagnosis(
        cause("a", 1.0), cause("b", -9.0), floor=97.0
    ),
    "Nothing here is worth changing: 100 % of a step is the computation itself.": diagnosis(
        cause("a", 1.0), floor=110.0
    ),
    "No single cause is worth changing: each takes less than 3 % of a step, and the computation itself 90 %.": (
        diagnosis(cause("a", 2.0, (1.5, 2.5)), cause("b", 1.0), floor=90.0)
    ),
    "Too noisy to tell whether anything is worth changing: a may take 3 % of a step or more.": diagnosis(
        cause("a", 2.0, (-1.0, 5.0)), cause("b", 1.0), floor=97.0
    ),
    "No cause could be tested here.": diagnosis(),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_verdict_says_no_more_than_was_measured(verdict):
    assert VERDICTS[verdict].verdict == verdict


def test_it_is_json_and_is_read_back():
    not_tested = (NotTested("precision", "it overflows"),)
    found = replace(diagnosis(cause("a", 40.0), cause("b", 1.0)), not_tested=not_tested)
    assert Diagnosis.from_dict(found.to_dict()) == found
    found = replace(found, date="2026-11-26", together=Comparison(ratio=2.5, interval=(2.25, 2.75)))
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Diagnosis.from_dict(written) == found
    assert written["now"]["repeats_ms"] == [[100.0], [100.0]]
    assert (written["verdict"], written["floor_ms"]) == (found.verdict, 50.0)
    assert written["unexplained_ms"] == pytest.approx(10.0)
    assert [each["counts"] for each in written["causes"]] == [True, False]


def test_in_a_console_it_is_its_verdict_and_in_a_notebook_its_text():
    found = diagnosis(cause("a", 40.0), cause("b", 10.0))
    assert repr(found) == f"<Diagnosis: {found.verdict}>"
    assert found._repr_html_() == f"<pre>{found}</pre>"
    assert replace(found, now=times(200.0)).verdict != found.verdict
