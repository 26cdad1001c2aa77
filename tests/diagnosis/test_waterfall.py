import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from diagnoses import cause, diagnosis
from hypothesis import given
from hypothesis import strategies as st

from tfopt.diagnosis import NotTested
from tfopt.diagnosis.waterfall import bars
from tfopt.measure import Comparison

CODE = f"data = build_pipeline({', '.join(f'option_{number}=None' for number in range(9))})\n\nmodel.fit(data)"
SLOW = diagnosis(
    cause("input", 40.0, evidence="A step whose batch lies ready takes 60 ms.", remedy=CODE, gain=1.5),
    cause("callback CSVLogger", 10.0, remedy=""),
    cause("validation", 2.0, (-1.0, 5.0)),
    cause("callback History", 0.04),
    cause("progress bar", -0.25),
    floor=40.0,
    not_tested=(
        NotTested("mixed precision", "float16 overflows in the layer dense_3, so it would change the result."),
    ),
    computation="It reaches 8 % of a matrix product's rate.",
    date="2026-11-26",
    environment={"tfopt": "0.1.0", "gpus": [{"name": "NVIDIA H100"}], "packages": {"keras": "3.15.1"}},
)
TEXT = f"""\
The most expensive cause: input, 40 ms of a 100 ms step (40 %).

  now                 █████████████████████████████████  100 ms (320 examples/s)
  input                                   █████████████  40 ms (39–41), 40 %
  callback CSVLogger                  ████               10 ms (9–11), 10 %
  not explained                    ███                   10 ms, 10 %
  the computation     █████████████                      40 ms (40–40), 40 %

input, 40 ms a step
  A step whose batch lies ready takes 60 ms.

    {CODE.splitlines()[0]}

    model.fit(data)

  With this change, training is predicted to be 1.5 times as fast (1.48–1.52).

callback CSVLogger, 10 ms a step
  Measured.

Tested and not worth changing: callback History 0.04 ms, progress bar (changed:
0.25 ms slower).
Too noisy to tell: validation 2 ms (−1 to 5).
Not tested: mixed precision (float16 overflows in the layer dense_3, so it would
change the result).

It reaches 8 % of a matrix product's rate."""


def rows(found) -> list[str]:
    """The lines of the waterfall."""
    return str(found).split("\n\n")[1].splitlines()


def page(found, path) -> ElementTree.Element:
    """The page's main part."""
    return ElementTree.fromstring(re.findall("<main>.*</main>", found.to_html(path).read_text(), re.DOTALL)[0])


def test_text():
    assert str(SLOW) == TEXT


def test_a_gain_that_was_not_tried_is_a_bound():
    found = str(diagnosis(replace(cause("input", 50.0, gain=2.0), at_most=True)))
    assert "\n  At best, if this cost nothing, training would be 2 times as fast.\n" in found
    assert "With this change" not in found


def test_what_all_of_it_gains_stands_after_the_causes(tmp_path):
    found = diagnosis(cause("a", 40.0), cause("b", 30.0), together=Comparison(ratio=2.5, interval=(2.25, 2.75)))
    sentence = "With all of these removed, a step through fit is 2.5 times as fast (95 %:\n2.25–2.75)."
    assert str(found).split("\n\n")[-2] == sentence
    assert sentence.replace("\n", " ") in "".join(page(found, tmp_path / "page.html").itertext())
    assert "at once" not in str(diagnosis(cause("a", 40.0)))


def test_nothing_counts():
    found = diagnosis(cause("a", 1.0), floor=98.0)
    assert str(found).startswith("Nothing here is worth changing: 98 % of a step is the computation itself.\n")
    assert [line.split()[0] for line in rows(found)] == ["now", "the"]


def test_what_is_left_over_is_shown_from_3_percent():
    assert "explained" not in str(diagnosis(cause("a", 48.0)))
    assert "not explained" in rows(diagnosis(cause("a", 46.0)))[2]
    overlap = diagnosis(cause("a", 40.0), cause("b", 30.0))
    assert rows(overlap)[3].split() == ["causes", "overlap", "█" * 7, "−20", "ms,", "−20", "%"]
    assert rows(overlap)[3].index("█") == rows(overlap)[2].index("█")
    assert "not explained" in rows(diagnosis(cause("a", 40.0), floor=70.0))[2]  # one cause overlaps with nothing


def test_of_an_unknown_batch_size_there_is_no_rate():
    found = diagnosis(floor=98.0, examples=None)
    assert rows(found)[0].endswith("  100 ms a step")


def test_long_names_are_cut_beside_the_bars_and_whole_below():
    name = "the callback with the longest name that anybody could think of"
    found = str(diagnosis(cause(name, 50.0)))
    assert "  the callback with the longest name tha…        ██████  50 ms (49–51), 50 %\n" in found
    assert f"\n{name}, 50 ms a step\n" in found


def test_a_number_stands_beside_its_unit_and_words_one_space_apart():
    fill = "x" * 75
    found = str(diagnosis(cause("a", 50.0, evidence=f"{fill} 3 ms,\n\n {fill} 3 %"), computation=f"{fill}  12 ms"))
    assert f"  {fill}\n  3 ms,\n  {fill}\n  3 %\n" in found
    assert found.endswith(f"{fill}\n12 ms")
    assert "\n  3 ms, well\n" in str(diagnosis(cause("a", 50.0, evidence="3 ms,\n\n well")))


words = st.text(max_size=150) | st.text("a-", min_size=90, max_size=150)
costs = st.floats(-1e5, 1e5)
measured = st.tuples(words, costs, st.floats(0, 1e5), words, st.sampled_from(["", CODE]), st.floats(0.1, 1e5))


@given(
    st.lists(measured, max_size=5),
    st.floats(1e-3, 1e6),
    st.lists(st.builds(NotTested, words, words), max_size=2),
    words,
)
def test_only_code_is_wider_than_80_columns(found, floor, not_tested, computation):
    causes = [
        cause(name, cost_ms, (cost_ms - around, cost_ms + around), *said) for name, cost_ms, around, *said in found
    ]
    shown = str(diagnosis(*causes, floor=floor, not_tested=tuple(not_tested), computation=computation))
    assert all(len(line) <= 80 for line in shown.split("\n") if line.strip() not in CODE)


def test_each_bar_begins_where_the_one_before_ends():
    now, *middle, computation = bars(SLOW)
    ends = [now.value, *(bar.start + bar.value for bar in middle)]
    assert [bar.start for bar in middle] == ends[:-1] == [100, 60, 50]
    assert (ends[-1], computation.start, computation.value) == (40, 0, 40)
    assert [(bar.low, bar.high) for bar in middle] == [(-41, -39), (-11, -9), (None, None)]


def test_the_page_draws_them_to_scale(tmp_path):
    drawn = [
        (float(rect.get("x", "").rstrip("%")), float(rect.get("width", "").rstrip("%")))
        for rect in page(SLOW, tmp_path / "page.html").iter("rect")
    ]
    assert drawn == [(0, 100), (60, 40), (50, 10), (40, 10), (0, 40)]  # milliseconds, of 100


def test_the_page_says_what_the_text_says(tmp_path):
    sections = {section.findtext("h2"): section for section in page(SLOW, tmp_path / "page.html")}
    assert list(sections) == [
        "Where a step goes",
        "input: 40 ms a step",
        "callback CSVLogger: 10 ms a step",
        "What was tested",
        "The computation",
        "Environment",
    ]
    assert sections["input: 40 ms a step"].findtext("pre") == CODE
    tested = ["".join(row.itertext()).split("\n") for row in sections["What was tested"].iter("tr")]
    assert [row[1:3] for row in tested[1:6]] == [
        ["input", "yes"],
        ["callback CSVLogger", "yes"],
        ["validation", "too noisy to tell"],
        ["callback History", "no"],
        ["progress bar", "no"],
    ]
    assert "float16 overflows" in "".join(sections["What was tested"].itertext())
    assert sections["The computation"].findtext("p") == SLOW.computation
    assert "Measured on NVIDIA H100, Keras 3.15.1, on 2026-11-26." in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("environment", [{}, {"host": {"cpu_model": None}, "packages": {"keras": None}}])
def test_the_page_of_an_unknown_machine(tmp_path, environment):
    path = diagnosis(environment=environment).to_html(str(tmp_path / "new" / "page.html"))
    assert path == tmp_path / "new" / "page.html"
    assert "Measured on an unknown CPU, no GPU." in path.read_text()
