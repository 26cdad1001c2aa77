"""Bars as an SVG file that stands by itself."""

import re
import xml.etree.ElementTree as ET

import pytest

from tfopt.page import Bar, picture

SVG = "{http://www.w3.org/2000/svg}"
BARS = [
    Bar("before", 1.0, "1×", tone="baseline"),
    Bar("<after> & later", 2.0, "2.00× [1.50–2.50]", low=1.5, high=2.5, tone="better"),
    Bar("without", 0.5, "0.50×", low=0.5, high=0.5, tone="worse"),
]


def drawn(**options):
    return ET.fromstring(picture(BARS, title="Speed", description="Longer is faster.", **options))


def test_bars_are_as_long_as_their_values():
    widths = [float(rect.get("width")) for rect in drawn().iter(f"{SVG}rect")]
    assert widths == pytest.approx([160, 320, 80])
    assert [rect.get("class") for rect in drawn().iter(f"{SVG}rect")] == ["baseline", "better", "worse"]


def test_whiskers_end_where_the_interval_does():
    first, second = [path.get("d") for path in drawn().iter(f"{SVG}path")]
    assert re.findall(r"M([\d.]+) ", first) == ["430.0", "430.0", "590.0"]  # 190 + 400 · 1.5 / 2.5, and the end
    assert re.findall(r"M([\d.]+) ", second) == ["270.0"] * 3


def test_the_reference_crosses_all_bars():
    (line,) = drawn(reference=1.0).iter(f"{SVG}line")
    assert line.get("x1") == line.get("x2") == "350.0"
    assert not list(drawn().iter(f"{SVG}line"))


def test_all_text_is_there_and_escaped():
    text = "".join(drawn().itertext())
    for part in ("Speed", "Longer is faster.", "<after> & later", "2.00× [1.50–2.50]"):
        assert part in text


def test_everything_is_inside():
    root = drawn(reference=1.0)
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x")) + float(rect.get("width")) <= width
        assert float(rect.get("y")) + float(rect.get("height")) <= height


def test_it_follows_the_scheme_and_needs_nothing_from_elsewhere():
    text = picture(BARS, title="t", description="d")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(href|src|url)", text)


def test_no_bar_is_refused():
    with pytest.raises(ValueError, match="at least one bar"):
        picture([], title="t", description="d")


def test_a_bar_and_its_interval_are_counted_from_its_start():
    bars = [Bar("now", 40, "40 ms"), Bar("input", -10, "10 ms", low=-12, high=-8, start=40)]
    root = ET.fromstring(picture(bars, title="t", description="d"))
    places = [(float(rect.get("x")), float(rect.get("width"))) for rect in root.iter(f"{SVG}rect")]
    assert places == [(190, 400), (490, 100)]
    (whisker,) = root.iter(f"{SVG}path")
    assert whisker.get("d").startswith("M470.0 95H510.0")
