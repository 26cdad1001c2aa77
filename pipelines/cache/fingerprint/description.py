"""What a value is to a fingerprint: a kind, a text and the values that it is made of."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Part = tuple[str, Any]  # how the part is reached, for messages, and the part: a value or a Description


@dataclass(frozen=True, slots=True)
class Description:
    """One value, described without its parts' own parts.

    Args:
        kind: What it is, such as "list".
        text: What of it is no value of its own, such as the name of a class.
        parts: The values that it is made of. A step of "" is not shown in messages.
        ordered: Whether the order of the parts counts.
    """

    kind: str
    text: str = ""
    parts: Iterable[Part] = ()
    ordered: bool = True


class RefusedError(Exception):
    """Raised inside the package for a value that cannot be fingerprinted; `fingerprint` adds where it was found.

    Args:
        found: What it is and why it cannot be, such as "a tf.Variable, whose value may change".
    """


def leaf(value: Any) -> bytes | None:
    """Returns the digest of a value without parts, None for any other; types are told apart."""
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
    elif kind is int:
        data = hex(value).encode()  # Python limits the length of decimal texts
    elif kind is float:
        data = value.hex().encode()  # tells -0.0 from 0.0, and takes every NaN for the same
    elif kind is complex:
        data = f"{value.real.hex()} {value.imag.hex()}".encode()
    elif kind is bytes:
        data = value
    elif value is None or kind is bool or value is Ellipsis or value is NotImplemented:
        data = repr(value).encode()
    else:
        return None
    return hashlib.sha256(kind.__name__.encode() + b":" + data).digest()


def digest(kind: str, text: str, parts: Iterable[bytes]) -> bytes:
    """Returns the digest of a value from those of its parts; lengths come first, so that nothing is ambiguous."""
    result = hashlib.sha256()
    for piece in (kind.encode(), text.encode("utf-8", "surrogatepass")):
        result.update(len(piece).to_bytes(8, "big") + piece)
    result.update(b"".join(parts))  # 32 bytes each
    return result.digest()
