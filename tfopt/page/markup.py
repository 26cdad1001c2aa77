"""Makes text from outside fit for HTML and SVG."""

import html
import re

# What XML 1.0 forbids (section 2.2, "Characters"): most control characters, and lone surrogates, which come with file
# names that are not UTF-8 and cannot be written to a file either.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Returns `text` with every character that no document may hold replaced."""
    return _FORBIDDEN.sub("\ufffd", text)


def escape(text: str) -> str:
    """Returns `text` escaped for HTML and XML, between tags or inside a quoted attribute."""
    return html.escape(printable(text), quote=True)
