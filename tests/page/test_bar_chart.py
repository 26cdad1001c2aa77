import dataclasses
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from tfopt.page import Bar, bar_chart

BASELINE = Bar("float32", 1.0, "1.00×", tone="baseline")
FASTER = Bar("bfloat16", 2.0, "2.00× (1.50–2.50)", 1.5, 2.5, "better")


def chart(*bars: Bar, **changes: Any) -> ElementTree.Element:
    arguments = {"title": "Speed", "description": "Against float32.", **changes}
    return ElementTree.fromstring(bar_chart(bars, **arguments))


def images(figure: ElementTree.Element) -> list[ElementTree.Element]:
    return [svg for svg in figure.iter("svg") if svg.get("role") == "img"]


def texts(figure: ElementTree.Element, name: str) -> list[str]:
    return ["".join(element.itertext()) for element in figure.iter() if element.get("class") == name]


def test_each_bar_has_its_label_its_value_and_an_image_with_title_and_description():
    figure = chart(BASELINE, FASTER)
    assert texts(figure, "name") == ["float32", "bfloat16"]
    assert texts(figure, "value") == ["1.00×", "2.00× (1.50–2.50)"]
    assert [svg.findtext("title") for svg in images(figure)] == ["float32: baseline", "bfloat16: better"]
    assert [svg.findtext("desc") for svg in images(figure)] == ["1.00×", "2.00× (1.50–2.50)"]


def test_title_and_description_stand_above():
    caption = chart(BASELINE).find("figcaption")
    assert caption is not None
    assert "".join(caption.itertext()) == "Speed Against float32."


def test_bar_reference_and_whisker_stand_where_the_values_say():
    svg = images(chart(FASTER, reference=1.0))[0]
    rect = svg.find(".//rect")
    assert rect is not None
    assert (rect.get("x"), rect.get("width")) == ("0.00%", "80.00%")
    lines = {line.get("class"): line.get("x1") for line in svg.findall("line")}
    assert lines == {"origin": "0.00%", "reference": "40.00%"}
    whisker = svg.find(".//g[@class='whisker']/line")
    assert whisker is not None
    assert (whisker.get("x1"), whisker.get("x2")) == ("60.00%", "100.00%")


def test_without_interval_or_reference_there_is_neither_whisker_nor_line():
    figure = chart(BASELINE)
    assert not figure.findall(".//g[@class='whisker']")
    assert not figure.findall(".//line[@class='reference']")
    assert texts(figure, "key") == ["baseline"]


def test_negative_bar_runs_left_of_zero():
    rects = list(chart(Bar("a", -10, "−10 %"), Bar("b", 30, "+30 %")).iter("rect"))
    assert [(rect.get("x"), rect.get("width")) for rect in rects] == [("0.00%", "25.00%"), ("25.00%", "75.00%")]


def test_key_names_what_is_used_and_nothing_else():
    worse = dataclasses.replace(FASTER, tone="worse")
    assert texts(chart(worse, BASELINE, reference=1, reference_label="as fast"), "key") == [
        "baseline worse interval as fast"
    ]
    assert texts(chart(BASELINE, reference=1), "key") == ["baseline reference"]


def test_tones_differ_by_shape_too():
    shapes = set()
    for tone in ("baseline", "better", "worse", "unclear"):
        path = chart(Bar("a", 1, "1", tone=tone)).find(".//span[@class='value']/svg/path")
        assert path is not None
        shapes.add(path.get("d"))
    assert len(shapes) == 4


def test_the_longer_bar_is_the_faster_one_however_far_apart_they_are():
    figure = chart(BASELINE, Bar("cached", 100, "100×"), Bar("network", 0.5, "0.5×"), reference=1.0)
    assert [rect.get("width") for rect in figure.iter("rect")] == ["1.00%", "100.00%", "0.50%"]


def test_prints_no_number_of_its_own():
    bars = [Bar("a", 0.0137, "tiny", 0.011, 0.019), Bar("b", 987.65, "huge")]
    for reference in (None, 1.25):
        figure = chart(*bars, description="Against one.", reference=reference)
        assert not re.findall(r"\d", "".join(figure.itertext()))


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert('x')</script>",
        "\"quoted\" 'twice' & more",
        "模型 → ×😀 مرحبا",
        "x" * 5000,
        "",
        "]]>",
        "a\x00\ud800",
    ],
)
def test_any_text_comes_through_as_text(text: str):
    shown = text.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    figure = chart(Bar(text, 1, text), title=text, description=text, reference=1, reference_label=text)
    name = figure.find(".//span[@class='name']")
    assert name is not None
    assert (name.text or "", name.get("title")) == (shown, shown)
    assert texts(figure, "value") == [shown]
    assert images(figure)[0].findtext("title") == f"{shown}: unclear"
    assert figure.findtext("figcaption/strong") == shown
    assert not list(figure.iter("script"))


def test_no_bar_is_refused():
    with pytest.raises(ValueError, match=r"at least one bar for the chart 'Speed'"):
        chart()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["value", "low", "high"])
def test_number_that_is_not_finite_is_refused(name: str, number: float):
    with pytest.raises(ValueError, match=rf"finite number as {name} of bar 'bfloat16'"):
        dataclasses.replace(FASTER, **{name: number})


def test_reference_is_checked():
    with pytest.raises(ValueError, match="finite number as reference"):
        chart(BASELINE, reference=math.nan)
    with pytest.raises(ValueError, match="Expected a reference"):
        chart(BASELINE, reference_label="as fast")


def test_interval_is_checked():
    with pytest.raises(ValueError, match="both ends"):
        Bar("a", 1, "1", low=0.5)
    with pytest.raises(ValueError, match="low <= high"):
        Bar("a", 1, "1", low=2, high=1)


def test_unknown_tone_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'better'"):
        Bar("a", 1, "1", tone="beter")  # type: ignore[arg-type]


def test_a_bar_and_its_interval_are_counted_from_its_start():
    figure = chart(Bar("now", 40, "40 ms"), Bar("input", -10, "10 ms", -12, -8, start=40))
    rects = list(figure.iter("rect"))
    assert [(rect.get("x"), rect.get("width")) for rect in rects] == [("0.00%", "100.00%"), ("75.00%", "25.00%")]
    whisker = figure.find(".//g[@class='whisker']/line")
    assert whisker is not None
    assert (whisker.get("x1"), whisker.get("x2")) == ("70.00%", "80.00%")
