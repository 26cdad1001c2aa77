import re
from importlib import resources

import pytest

from tfopt.page import MOST_LINES, Page, Section, render

STYLE = resources.files("tfopt.page").joinpath("style.html.jinja").read_text(encoding="utf-8")
COLOURS = re.findall(r":root \{([^}]*)\}", STYLE)


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))


LIGHT, DARK = variables(COLOURS[0]), variables(COLOURS[1])


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2, 'relative luminance' and 'contrast ratio'."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_both_schemes_define_every_colour_that_is_used():
    used = set(re.findall(r"var\(--(\w+)\)", STYLE)) - {"tone", "line", "left", "right", "narrowest"}
    assert used == set(LIGHT) == set(DARK)
    assert STYLE.index("prefers-color-scheme: dark") < STYLE.index(COLOURS[1])
    assert not set(LIGHT.values()) & set(DARK.values())


def test_each_tone_of_a_bar_has_a_colour():
    assert set(re.findall(r"\.(\w+) \{ --tone: var\(--(\w+)\); \}", STYLE)) == {
        *((tone, tone) for tone in ("baseline", "better", "worse", "unclear")),
        ("plain", "baseline"),
    }


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_meets_wcag_aa(scheme: dict[str, str]):
    for ground in ("paper", "panel"):
        for text in ("ink", "muted", "accent"):
            assert contrast(scheme[text], scheme[ground]) >= 4.5, (text, ground)
    for graphic in ("baseline", "better", "worse", "unclear", "line0", "line1", "line2", "line3"):
        assert contrast(scheme[graphic], scheme["paper"]) >= 3, graphic


def test_each_style_of_a_line_is_another_colour_or_dash():
    styles = re.findall(r"\.line(\d), \.line(\d) \{ --line: var\(--(\w+)\); \}", STYLE)
    assert styles == [(str(number), str(number + 4), f"line{number}") for number in range(MOST_LINES // 2)]
    assert re.findall(r"path:is\((.*)\):not\(.dots\) \{ stroke-dasharray", STYLE) == [".line4, .line5, .line6, .line7"]


def test_lines_of_code_stay_whole_and_scroll():
    document = render(Page("Title", "Lead.", [Section("Do this", code="x = 1")]))
    assert re.search(r'<pre class="code scroll"[^>]* tabindex="0">x = 1</pre>', document)
    assert re.search(r"^pre\.code \{[^}]* white-space: pre; \}", STYLE, re.M)
    assert re.search(r"^\.scroll \{[^}]* overflow-x: auto; \}", STYLE, re.M)


def test_colours_come_from_variables_only():
    rules = STYLE.replace(COLOURS[0], "").replace(COLOURS[1], "")
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl|gradient", rules)
