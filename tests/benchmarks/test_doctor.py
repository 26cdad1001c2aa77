"""benchmarks/doctor.py: docs/diagnosis.md and README.md show the recorded diagnosis."""

import json

import doctor
import pytest

from tfopt.diagnosis import Diagnosis

RECORDED = json.loads(doctor.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "said"), [(doctor.LONG, doctor.begun), (doctor.SHORT, doctor.short)])
def test_the_pages_show_the_recorded_diagnosis(page, said):
    text = page.read_text(encoding="utf-8")
    diagnosis = Diagnosis.from_dict(RECORDED)
    assert diagnosis.worth_changing
    assert doctor.filled(text, said(diagnosis)) == text


def test_the_record_is_what_the_command_prints_and_the_pages_say_where_it_ran():
    printed = json.loads(json.dumps(Diagnosis.from_dict(RECORDED).to_dict()))
    assert printed.pop("unexplained_ms") == pytest.approx(RECORDED["unexplained_ms"])  # sums differ between Pythons
    assert printed == {name: value for name, value in RECORDED.items() if name != "unexplained_ms"}
    found = RECORDED["environment"]
    assert (found["host"]["cpus"], found["gpus"]) == (2, [])
    for page in (doctor.LONG, doctor.SHORT):
        assert "on two CPU cores" in page.read_text(encoding="utf-8")


def test_a_page_is_filled_again_and_again():
    page = (
        "before\n\n```\n$ tfopt-bench doctor examples/diagnose.py\nold\n\n    code\n```\n\nafter\n\n```\nother\n```\n"
    )
    expected = page.replace("old\n\n    code", "new \\1 50 %")
    for before in (page, page.replace("old\n\n    code\n", ""), expected):
        assert doctor.filled(before, "new \\1 50 %") == expected
    with pytest.raises(ValueError, match=r"block that begins with the command\. Found 0"):
        doctor.filled("```\nother\n```\n", "new")
