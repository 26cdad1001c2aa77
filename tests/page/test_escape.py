from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tfopt.page.document import escape, printable


def test_markup_and_quotes_are_escaped():
    assert escape("<b a=\"1\" c='2'>&") == "&lt;b a=&quot;1&quot; c=&#x27;2&#x27;&gt;&amp;"


def test_what_no_document_may_hold_is_replaced():
    assert printable("a\x00b\x1b\ud800\uffff") == "a\ufffdb\ufffd\ufffd\ufffd"
    assert printable("line\n\ttab ×→模型😀") == "line\n\ttab ×→模型😀"


@given(st.text(alphabet=st.characters(codec=None, exclude_characters="\r")))
def test_any_text_comes_through_xml_and_utf8(text: str):
    element = ElementTree.fromstring(f'<a b="">{escape(text)}</a>'.encode())
    assert (element.text or "") == printable(text)
