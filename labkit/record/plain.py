"""Untrusted JSON as plain values: bounded in depth, and with text that can be encoded."""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 32  # nesting of lists and objects; labkit itself writes at most ten levels
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(content: bytes) -> Any:
    """The value of a JSON text. Raises `ValueError`, one clause, if it is invalid or nested deeper than `DEEPEST`.

    Numbers that Python's `json` accepts beyond the standard (NaN, Infinity) pass. An unpaired surrogate becomes the
    replacement character.
    """
    text = content.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    if text.count("[") + text.count("{") > DEEPEST and not _is_flat(value):
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return _encodable(value) if _SURROGATE.search(text) else value


def _is_flat(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    return value
