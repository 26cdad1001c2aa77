import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfopt.page import MOST_LINES, Line, Marks, Page, Panel, Section, Shade, line_chart, render

SECONDS = [0.0, 50.0, 100.0]


def line(label="", values=(0.0, 50.0, 100.0), seconds=SECONDS):
    return Line(label, seconds, values)


def panel(*lines, **changes):
    return Panel(**{"title": "Power", "unit": "W", "lines": lines or (line(),), **changes})


def chart(*panels, **changes):
    arguments = {"title": "Readings", "description": "From the start.", "seconds": 100.0, **changes}
    return ElementTree.fromstring(line_chart(panels or (panel(),), **arguments))


def paths(figure, name="line"):
    return [path.get("d") for path in figure.iter("path") if name in (path.get("class") or "").split()]


def drawn(figure):
    """The lines of the panels, without the samples in the key."""
    return [path for div in figure.findall("div") for path in paths(div)]


def texts(element, name):
    return ["".join(found.itertext()) for found in element.iter() if found.get("class") == name]


def test_a_line_stands_where_its_values_say():
    assert drawn(chart()) == ["M0 400L1000 200 2000 0"]
    assert drawn(chart(panel(line(values=(20, 40, 60)), top=80), seconds=200)) == ["M0 300L500 200 1000 100"]


def test_an_unknown_value_is_a_gap_and_a_value_between_two_is_a_dot():
    known = [10.0, 20.0, None, 40.0, None, 60.0, 100.0, None]
    figure = chart(panel(line(values=known, seconds=range(8)), top=100), seconds=10)
    assert drawn(figure) == ["M0 360L200 320M1000 160L1200 0", "M600 240L600 240"]
    assert paths(figure, "dots") == drawn(figure)[1:]
    assert drawn(chart(panel(line(values=[None, None, None])))) == [""]


def test_an_axis_begins_at_zero_and_ends_above_the_values():
    assert texts(chart(panel(line(values=(610, 640, 690)))).find("div"), "tick")[:5] == [
        "0",
        "200",
        "400",
        "600",
        "800",
    ]
    assert texts(chart(panel(line(values=(-4, 0, 4)))).find("div"), "tick")[:5] == ["−4", "−2", "0", "2", "4"]


def test_what_is_above_the_top_is_drawn_at_the_edge():
    assert drawn(chart(panel(line(values=(50, 900, 50)), top=100))) == ["M0 200L1000 0 2000 200"]


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-300, 7.0, 1e300, 1.7e308, -1.7e308])
def test_constants_small_and_huge(value):
    figure = chart(panel(line(values=[value] * 3)))
    numbers = [float(number) for number in re.findall(r"[\d.]+", drawn(figure)[0])]
    assert all(0 <= number <= 2000 for number in numbers)
    assert drawn(figure)[0].count(" ") >= 3


def test_the_difference_of_two_huge_values():
    assert drawn(chart(panel(line(values=(-1.7e308, 0.0, 1.7e308))))) == ["M0 400L1000 200 2000 0"]


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_any_values_stay_in_the_panel(values):
    figure = chart(panel(line(values=values, seconds=range(len(values))), line("b", [], [])), seconds=10)
    for path in drawn(figure):
        places = [
            [int(number) for number in place.split()] for place in re.split("[ML]| (?=[0-9]+ [0-9]+)", path) if place
        ]
        assert all(0 <= number <= 2000 for place in places for number in place)


def test_empty_lines_and_one_point():
    assert drawn(chart(panel(line(values=[], seconds=[])))) == [""]
    assert drawn(chart(panel(line(values=[1.0], seconds=[0.0])), seconds=1e-9)) == ["", "M0 0L0 0"]


def test_a_shade_runs_there_along_the_highest_and_back_along_the_lowest():
    shade = Shade([0, 50, 100, 150, 200], [10, 20, None, 0, 0], [30, 40, None, 100, 50])
    figure = chart(panel(line(values=(20, 30, 40)), shade=shade, top=100), seconds=200)
    assert paths(figure.find("div"), "shade") == ["M0 280L500 240 500 320 0 360zM1500 0L2000 200 2000 400 1500 400z"]
    assert "lowest to highest" in texts(figure, "key")[0]
    assert not texts(chart(), "key")


def test_each_device_has_its_style_in_every_panel():
    one = panel(line("GPU 0"), line("GPU 1"))
    other = panel(line("GPU 1"), line("GPU 2"), title="Memory")
    alone = panel(line("GPU 2"), title="Clock")
    figure = chart(one, other, alone, panel(title="Step time"))
    styles = [[path.get("class") for path in div.iter("path")] for div in figure.findall("div")]
    assert styles == [["line line0", "line line1"], ["line line1", "line line2"], ["line line2"], ["line only"]]
    assert not texts(figure, "key"), "lines are labelled where they end"


def test_there_is_room_for_the_labels():
    def room(*labels):
        return float(re.search(r"--right: ([\d.]+)rem", chart(panel(*map(line, labels))).get("style"))[1])

    assert room("") < room("a", "b") < room("training", "validation") < 6
    assert room("x" * 3000, "b") < 8


def test_an_axis_of_epochs():
    figure = chart(panel(line(values=(4, 2, 0), seconds=(1, 3, 5))), seconds=None, epochs=(1, 5))
    assert drawn(figure) == ["M0 0L1000 200 2000 400"]
    assert texts(figure.find("div"), "tick")[-5:] == ["epoch\u00a01", "2", "3", "4", "5"]
    with pytest.raises(ValueError, match=r"at least two epochs for the chart 'Readings'\. Received: \(5, 5\)"):
        chart(seconds=None, epochs=(5, 5))
    for both in ({"epochs": (1, 5)}, {"seconds": None}):
        with pytest.raises(ValueError, match="either seconds or epochs"):
            chart(**both)


def test_an_axis_need_not_begin_at_zero():
    def low(*values):
        return texts(chart(panel(line(values=values), from_zero=False)).find("div"), "tick")[0]

    assert low(0.91, 0.95, 0.97) == "0.90"
    assert low(0.3, 1.2, 2.3) == "0", "near enough"
    assert low(0.9, 0.9, 0.9) == "0.0", "a constant"


def test_equal_distances_are_equal_ratios_on_a_logarithmic_axis():
    figure = chart(panel(line(values=(1000, 10, 0.1)), logarithmic=True))
    assert drawn(figure) == ["M0 0L1000 200 2000 400"]
    assert texts(figure.find("div"), "tick")[:5] == ["0.1", "1", "10", "100", "1,000"]
    assert drawn(chart(panel(line(values=(100, 50, 0)), logarithmic=True))) == drawn(
        chart(panel(line(values=(100, 50, 0))))
    )


def test_the_highest_tick_has_the_unit():
    ticks = texts(chart(panel(line(values=(610, 640, 690)), tick_unit="<W>")).find("div"), "tick")
    assert ticks[:5] == ["0", "200", "400", "600", "800\u00a0<W>"]


def test_panels_stand_in_groups_and_columns():
    figure = chart(panel(group="Pace"), panel(group="GPUs"), panel(group="GPUs"), columns=2)
    assert [(one.tag, one.get("class")) for one in figure][1:] == [
        ("p", "group"),
        ("div", "panel"),
        ("p", "group"),
        ("div", "panel"),
        ("div", "panel"),
    ]
    assert texts(figure, "group") == ["Pace", "GPUs"]
    assert "26rem" in figure.get("style")
    with pytest.raises(ValueError, match=r"1, 2 or 3 columns in the chart 'Readings'\. Received: 4"):
        chart(columns=4)


def end_labels(figure):
    """Each label at the right edge with its height in percent."""
    svg = figure.find("div/svg/svg[@x='100%']")
    return [(text.text, float(text.get("y").rstrip("%"))) for text in svg.iter("text")]


def test_labels_stand_at_the_lines_ends_in_their_order_and_apart():
    lines = [line(f"GPU {number}", (0, 0, value)) for number, value in enumerate((50, 100, 50.5, 0))]
    found = end_labels(chart(panel(*lines, top=100)))
    assert [label for label, _ in found] == ["GPU 1", "GPU 2", "GPU 0", "GPU 3"]
    assert [place for _, place in found] == [0.0, 49.5, 60.5, 100.0]


def test_many_labels_at_the_bottom_move_up():
    lines = [line(f"GPU {number}", (9, 9, 0)) for number in range(MOST_LINES)]
    places = [place for _, place in end_labels(chart(panel(*lines, top=10)))]
    assert places == [23.0, 34.0, 45.0, 56.0, 67.0, 78.0, 89.0, 100.0]


def test_a_line_of_which_nothing_is_known_has_no_label():
    assert [label for label, _ in end_labels(chart(panel(line("a"), line("b", [None] * 3))))] == ["a"]


def test_marks_stand_in_every_panel_and_once_in_the_key():
    marks = [
        Marks("epoch", [25.0, 75.0], "division"),
        Marks("compilation", [10.0]),
        Marks("alert", [50.0], "alarm"),
        Marks("none of these", []),
    ]
    figure = chart(panel(), panel(title="Memory"), marks=marks)
    for div in figure.findall("div"):
        places = [(svg.get("class"), svg.get("x")) for svg in div.iter("svg") if svg.get("class") not in (None, "plot")]
        assert places == [("division", "25.00%"), ("division", "75.00%"), ("note", "10.00%"), ("alarm", "50.00%")]
    assert texts(figure, "key") == ["epoch compilation alert"]


def test_kinds_of_marks_differ_by_shape():
    figure = chart(marks=[Marks("a", [1], "division"), Marks("b", [1], "note"), Marks("c", [1], "alarm")])
    shapes = [
        ("".join(path.get("d") for path in svg.iter("path")), len(list(svg.iter("line"))))
        for svg in figure.find("div").iter("svg")
        if svg.get("class") in ("division", "note", "alarm")
    ]
    assert len(set(shapes)) == 3


def test_title_unit_and_text_are_shown_and_said():
    figure = chart(panel(unit="W a board", text="mean 610 W"))
    assert texts(figure, "quantity") == ["Power W a boardmean 610 W"]
    svg = figure.find("div/svg")
    assert (svg.get("role"), svg.findtext("title"), svg.findtext("desc")) == ("img", "Power", "W a board; mean 610 W")


@pytest.mark.parametrize(
    "text", ["<script>alert('x')</script>", "\"'&", "模型😀", "x" * 3000, "]]>", "a\x00\ud800", ""]
)
def test_any_text_comes_through_as_text(text):
    shown = text.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    lines = [line(text), line("b")]
    figure = chart(
        panel(*lines, title=text, unit=text, text=text), title=text, description=text, marks=[Marks(text, [1])]
    )
    assert figure.findtext("figcaption/strong") == shown
    assert figure.findtext("div/p/strong") == figure.findtext("div/p/b") == shown
    assert (end_labels(figure)[0][0] or "") == shown
    assert not list(figure.iter("script"))


def test_it_goes_into_a_page():
    markup = line_chart([panel()], title="T", description="D", seconds=1)
    assert markup in render(Page("P", "L", [Section("S", charts=[markup])]))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(number):
    with pytest.raises(ValueError, match="finite numbers as values of line 'GPU 0'"):
        line("GPU 0", (0, number, 1))
    with pytest.raises(ValueError, match="finite numbers as high of a shade"):
        Shade([0], [0], [number])
    with pytest.raises(ValueError, match="finite numbers as places of 'alert'"):
        Marks("alert", [number])
    with pytest.raises(ValueError, match="seconds of the chart 'Readings' to be above 0"):
        chart(seconds=number)


def test_columns_of_unlike_length_are_refused():
    expected = r"Expected all columns to have the same length in line 'a'\. Received: 3 at, 1 values"
    with pytest.raises(ValueError, match=expected):
        line("a", [1.0])
    with pytest.raises(ValueError, match="a shade"):
        Shade([0, 1], [0, 1], [0])
    with pytest.raises(ValueError, match="both edges"):
        Shade([0], [None], [1])


def test_bad_panels_and_marks_are_refused():
    with pytest.raises(ValueError, match=r"Expected 1 to 8 lines in panel 'Power'\. Received: 9"):
        panel(*[line(str(number)) for number in range(9)])
    with pytest.raises(ValueError, match="Received: 0"):
        Panel("Power", "W", [])
    with pytest.raises(ValueError, match="top of panel 'Power' to be above 0"):
        panel(top=0)
    with pytest.raises(ValueError, match="Did you mean 'alarm'"):
        Marks("alert", [1], "alrm")
    with pytest.raises(ValueError, match="at least one panel for the chart 'T'"):
        line_chart([], title="T", description="D", seconds=1)
