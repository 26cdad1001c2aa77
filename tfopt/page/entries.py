"""Nested values as the rows of a table."""

import json
from collections.abc import Mapping
from typing import Any


def entries(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Returns each entry as (dotted name, text), None as "unknown".

    Example:
        >>> entries({"host": {"cpus": 2.0, "cpu_model": None}})
        [('host.cpus', '2.0'), ('host.cpu_model', 'unknown')]
    """
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += entries(value, f"{prefix}{name}.")
        else:
            text = "unknown" if value is None else value if isinstance(value, str) else json.dumps(value)
            found.append((prefix + name, text))
    return found
