import html.parser
import re
import sys
from collections.abc import Iterator

import pytest

from tfopt.errors import UnsupportedError
from tfopt.page import Bar, Page, Section, Table, bar_chart, entries, render, require_renderer

VOID = {"meta", "br", "wbr", "hr", "link", "img", "input"}


class Outline(html.parser.HTMLParser):
    """Reads a page: the tags still open, all that were opened with their attributes, and the text shown."""

    def __init__(self, document: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in <{tag}>"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.texts.append((self.open[-1], data.strip()))

    def named(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if tag in tags]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page(*sections: Section) -> Page:
    return Page("Title", "Lead.", sections)


def strings(value: object) -> Iterator[str]:
    """All texts inside a page, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
    elif hasattr(value, "__slots__"):
        for name in value.__slots__:
            yield from strings(getattr(value, name))


def test_sample_is_well_formed(sample_page: Page):
    outline = Outline(render(sample_page))
    assert outline.open == []
    assert outline.count("figure") == 4
    assert outline.count("table") == 3
    assert outline.count("details") == 2


def test_headings_are_in_order_and_ids_unique(sample_page: Page):
    outline = Outline(render(sample_page))
    headings = [tag for tag, _ in outline.tags if re.fullmatch("h[1-6]", tag)]
    assert headings == ["h1", "h2", "h2", "h2", "h2"]
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) == 4


def test_refers_to_nothing_outside_itself(sample_page: Page):
    document = render(sample_page)
    outline = Outline(document)
    ids = {f"#{attributes['id']}" for _, attributes in outline.tags if "id" in attributes}
    assert not {tag for tag, _ in outline.tags} & {"script", "link", "img", "iframe", "object", "base", "image", "use"}
    references = [
        v for _, attributes in outline.tags for k, v in attributes.items() if k in ("src", "href", "xlink:href")
    ]
    assert set(references) == ids
    assert not re.findall(r"https?:|//\w|url\(|@import|@font-face", document)
    policy = [attributes["content"] for _, attributes in outline.tags if "http-equiv" in attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_each_number_shown_is_one_that_the_caller_passed(sample_page: Page):
    # Markup of charts is taken out, so that a coordinate in it does not count as passed.
    given = re.sub(r"<[^>]*>", " ", " ".join(strings(sample_page)))
    number = r"\d+(?:[.,]\d+)*"
    shown = {found for _, text in Outline(render(sample_page)).texts for found in re.findall(number, text)}
    assert shown <= set(re.findall(number, given))
    assert {"2.31", "15,481", "143,771", "412"} <= shown


def test_a_page_without_numbers_shows_none():
    table = Table(["Name", "Value"], [["device", "none"]], caption="Environment")
    sections = [Section(name, "text", tables=[table], details=[("more", table), ("log", "line")]) for name in "abcd"]
    assert not re.findall(r"\d", " ".join(text for _, text in Outline(render(page(*sections))).texts))


def test_contents_only_for_more_than_three_sections():
    sections = [Section(name) for name in ("One", "Two", "Three", "Four")]
    assert Outline(render(page(*sections[:3]))).count("nav") == 0
    outline = Outline(render(page(*sections)))
    assert outline.named("a") == outline.named("h2") == ["One", "Two", "Three", "Four"]
    targets = [attributes["href"] for tag, attributes in outline.tags if tag == "a"]
    assert targets == [f"#{attributes['id']}" for tag, attributes in outline.tags if tag == "section"]


def test_title_lead_paragraphs_and_footer_are_shown():
    outline = Outline(
        render(Page("Run <1>", "First.\n\nSecond.", [Section("S", "Third.\n\n\n\nFourth.\n\n")], "Small."))
    )
    assert outline.named("title", "h1") == ["Run <1>", "Run <1>"]
    assert outline.named("p") == ["First.", "Second.", "Third.", "Fourth.", "Small."]
    assert outline.count("p") == 5, "no empty paragraph"
    assert Outline(render(page())).count("footer") == 0


def test_the_numbers_that_matter_most_stand_below_the_lead():
    figures = [("Throughput", "26,706", "examples/s"), ("Waited <for> input", "1.9", "%")]
    outline = Outline(render(Page("T", "L", [], figures=figures)))
    assert outline.named("dt") == ["Throughput", "Waited <for> input"]
    assert outline.named("dd", "small") == ["26,706", "examples/s", "1.9", "%"]
    assert not Outline(render(page())).count("dl")


def test_long_names_of_columns_may_break_after_an_underscore():
    table = Table(["val_<b>_accuracy"], [["a_b"]])
    assert "val_<wbr>&lt;b&gt;_<wbr>accuracy</th>" in render(page(Section("S", tables=[table])))


def test_table_keeps_cells_alignment_and_scope():
    table = Table(["Policy", "Step"], [["float32", "38.2 ms"]], align="lr", caption="Steps")
    outline = Outline(render(page(Section("S", tables=[table]))))
    assert outline.named("caption", "th", "td") == ["Steps", "Policy", "Step", "float32", "38.2 ms"]
    cells = [(tag, a.get("class"), a.get("scope")) for tag, a in outline.tags if tag in ("th", "td")]
    assert cells == [("th", "l", "col"), ("th", "r", "col"), ("th", "l", "row"), ("td", "r", None)]
    boxes = [a for tag, a in outline.tags if a.get("class") == "scroll"]
    assert [(box["aria-label"], box["tabindex"]) for box in boxes] == [("Steps", "0")]


def test_details_are_folded_and_hold_a_table_or_lines():
    details = [("Samples", Table(["Block"], [["a"]])), ("Log", "one\ntwo")]
    outline = Outline(render(page(Section("S", details=details))))
    assert outline.named("summary") == ["Samples", "Log"]
    assert outline.named("pre") == ["one\ntwo"]
    assert outline.named("th") == ["Block", "a"]
    assert all("open" not in attributes for tag, attributes in outline.tags if tag == "details")


def test_chart_goes_in_as_markup():
    chart = bar_chart([Bar("a", 1, "1×")], title="T", description="D")
    assert chart in render(page(Section("S", charts=[chart])))


@pytest.mark.parametrize(
    "text", ["<script>alert('x')</script>", '"><img src=x onerror=y>', "{{ page }}", "模型😀", "y" * 5000]
)
def test_any_text_comes_through_as_text(text: str):
    table = Table([text], [[text]], caption=text)
    section = Section(text, text, tables=[table], details=[(text, text), (text, table)])
    outline = Outline(render(Page(text, text, [section] * 4, text)))
    assert outline.open == []
    assert {shown for _, shown in outline.texts} == {text}
    assert not outline.count("script") + outline.count("img")


def test_what_no_document_may_hold_is_replaced():
    document = render(Page("a\x00b", "c\ud800d", [Section("S", tables=[Table(["h"], [["e\x1bf"]])])]))
    assert "a\ufffdb" in document
    assert "c\ufffdd" in document
    assert "e\ufffdf" in document
    document.encode()


def test_jinja_missing_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnsupportedError, match=r"pip install jinja2"):
        render(page())
    with pytest.raises(UnsupportedError, match=r"pip install jinja2"):
        require_renderer()


def test_table_is_checked():
    with pytest.raises(ValueError, match=r"Expected 2 cells, one per header, in row 1\. Received: \['c'\]"):
        Table(["x", "y"], [["a", "b"], ["c"]])
    with pytest.raises(ValueError, match="Received: 'ab'"):
        Table(["x", "y"], ["ab"])
    with pytest.raises(TypeError, match=r"Received: 38\.2\. Format it first"):
        Table(["x"], [[38.2]])  # type: ignore[list-item]
    for align in ("l", "lx"):
        with pytest.raises(ValueError, match="align"):
            Table(["x", "y"], [], align=align)


def test_one_where_a_list_belongs_is_refused():
    table = Table(["x"], [["a"]])
    with pytest.raises(TypeError, match=r"charts=\[\.\.\.\]"):
        Section("S", charts="<figure></figure>")
    with pytest.raises(TypeError, match="tables"):
        Section("S", tables=table)  # type: ignore[arg-type]


def test_nested_values_become_rows():
    values = {"python": "3.11", "host": {"cpus": 2.0, "name": None}, "gpus": [{"memory_mib": 1536.0}], "variables": {}}
    assert entries(values) == [
        ("python", "3.11"),
        ("host.cpus", "2"),
        ("host.name", "unknown"),
        ("gpus.0.memory", "1.5 GiB"),
    ]
    assert entries({"gpus": [], "affinity": [0, 1], "tf32": True, "threads": 0}) == [
        ("gpus", "none"),
        ("affinity", "0, 1"),
        ("tf32", "yes"),
        ("threads", "0"),
    ]
