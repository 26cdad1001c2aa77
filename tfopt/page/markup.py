"""Makes untrusted text safe for HTML and SVG."""

import html
import re

# Forbidden by XML 1.0 (section 2.2, "Characters"): most control characters, and lone surrogates, which come from file
# names that are not UTF-8 and cannot be written to a file.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Replaces the characters that no document may contain."""
    return _FORBIDDEN.sub("\ufffd", text)


def escape(text: str) -> str:
    """Escapes text for HTML and XML, between tags or inside a quoted attribute."""
    return html.escape(printable(text), quote=True)
