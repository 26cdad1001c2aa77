"""Text from outside, made fit to stand in HTML and in SVG."""

import html
import re

# What XML 1.0 forbids (section 2.2, "Characters"): most control characters, and lone surrogates, which a file name that
# is not UTF-8 brings along and which cannot be written to a file either.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Returns `text` with the replacement character for each one that no document may hold."""
    return _FORBIDDEN.sub("\ufffd", text)


def escape(text: str) -> str:
    """Returns `text` so that HTML and XML show it as it is, between tags or inside a quoted attribute."""
    return html.escape(printable(text), quote=True)
