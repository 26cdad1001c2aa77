"""The text of XLA_FLAGS, read and written as XLA reads it."""

import re
from collections.abc import Mapping

from tfopt.errors import UnsupportedError

# As XLA reads them: --name, --name=value or --name="quoted value", with spaces between.
_FLAG = re.compile(r"""\s*--([\w-]+)(?:=("(?:\\.|[^"\\])*"|'[^']*'|\S*))?(?=\s|$)""")


def read(text: str) -> dict[str, str]:
    """Name → value of the flags in a text.

    Raises:
        tfopt.errors.UnsupportedError: XLA would not read it to its end.
    """
    found: dict[str, str] = {}
    at = 0
    while match := _FLAG.match(text, at):
        found[match[1]] = "true" if match[2] is None else _unquoted(match[2])
        at = match.end()
    if text[at:].strip():
        raise UnsupportedError(
            f"Expected XLA_FLAGS to hold flags, --name=value with spaces between. Found {text[at:].strip()!r}, from "
            "where XLA reads no flags on (a whole value without -- is the name of a file of flags). "
            "Mend the environment variable, or unset it."
        )
    return found


def _unquoted(value: str) -> str:
    if value.startswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value[1:-1] if value.startswith("'") else value


def line(values: Mapping[str, str]) -> str:
    """The text that XLA reads these flags from."""
    return " ".join(f"--{name}={_quoted(value)}" for name, value in values.items())


def _quoted(value: str) -> str:
    """In quotes where XLA would take a space for the end, or a quote for the beginning of quotes."""
    if re.search(r"\s|^[\"']", value):
        return '"{}"'.format(re.sub(r'(["\\])', r"\\\1", value))
    return value
