"""Checks of single values that a user passes, in Python or on the command line: numbers with bounds, choices, paths,
flags.

Each raises `ValueError` or `TypeError` with one sentence that names the argument, the value and the allowed values.
Standard library only, because the command line checks its flags before the environment is set up.
"""

from __future__ import annotations

import difflib
import numbers
import operator
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_LONGEST = 80  # characters of a value that a message quotes
_MOST_LISTED = 24  # names that a message lists; of more, those that are like the value
_MOST_COMPARED = 100  # characters of a value


def shown(value: Any) -> str:
    """`repr` of a value for a message: one line of at most 80 characters. It never raises."""
    if isinstance(value, int) and value.bit_length() > 4 * _LONGEST:
        return f"an integer of {value.bit_length()} bits"  # Python cannot convert very long ones to text
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the __repr__ of a user's class may raise anything
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


@dataclass(frozen=True)
class Number:
    """The bounds of a number: `kind` is int or float; `minimum` and `maximum` are finite and inclusive."""

    kind: type
    minimum: float
    maximum: float

    @property
    def allowed(self) -> str:
        """The allowed values in words: `an integer from 1 to 65536`."""
        kind = "an integer" if self.kind is int else "a number"
        return f"{kind} from {_plain(self.minimum)} to {_plain(self.maximum)}"

    def check(self, name: str, value: Any) -> Any:
        """`value` as an int or float; `ValueError` if it is not a number within the bounds (True and False are not
        numbers)."""
        found = self._number(value)
        if found is None:
            raise ValueError(f"{name} must be {self.allowed}, got {shown(value)}")
        return found

    def read(self, name: str, text: str) -> Any:
        """The number in a text; `ValueError` as in `check`."""
        return self.check(name, self.from_text(text))

    def from_text(self, text: Any) -> Any:
        """The number in a text, without checking the bounds; the text itself if it is not a number."""
        try:
            return self.kind(text)
        except (TypeError, ValueError):
            return text

    def _number(self, value: Any) -> Any:
        if isinstance(value, bool):
            return None
        try:
            found = operator.index(value) if self.kind is int else self._real(value)
        except (TypeError, ValueError, OverflowError):
            return None
        return found if self.minimum <= found <= self.maximum else None  # NaN fails both comparisons

    def _real(self, value: Any) -> float:
        if not isinstance(value, numbers.Real):
            raise TypeError
        return float(value)


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


SECONDS = Number(float, 0.0, 31_536_000.0)  # up to a year: much longer waits overflow the system's clock


ROUNDS = Number(int, 1, 100)  # repetitions of a measurement


def check_seconds(name: str, value: Any) -> float | None:
    """A duration in seconds, or None for no limit."""
    return None if value is None else SECONDS.check(f"{name} (seconds)", value)


def check_flag(name: str, value: Any) -> bool:
    """A bool; other truthy or falsy values are rejected."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of the names in `allowed`."""
    names = list(allowed)
    if isinstance(value, str) and value in names:
        return value
    listed = names
    if len(names) > _MOST_LISTED:
        near = difflib.get_close_matches(str(value)[:_MOST_COMPARED], names) if isinstance(value, str) else []
        listed = [*(near or names[:_MOST_LISTED]), f"… ({len(names)} names)"]
    raise ValueError(f"{name} must be one of {', '.join(listed)}, got {shown(value)}")


def check_path(name: str, value: Any) -> str:
    """A path as text: from a non-empty `str` or `os.PathLike` without null characters."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path (str or pathlib.Path), got {shown(value)}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"{name} must be a non-empty path, got {shown(value)}")
    return path


def check_address(name: str, value: str) -> str:
    """An address of this machine that a server can listen on: `127.0.0.1`, a host name, or `*` for all interfaces."""
    if value == "*":
        return value
    try:
        found = socket.getaddrinfo(value or None, 0, type=socket.SOCK_STREAM) if value else []
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise ValueError(
            f"{name} must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all interfaces, got"
            f" {shown(value)}"
        )
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            raise ValueError(
                f"{name} {value} is not an address of this machine; use 127.0.0.1 for this machine only, or 0.0.0.0 for"
                " all interfaces"
            ) from None
    return value


def check_type(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> Any:
    """A value of a class; `wanted` describes the class, with an example."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")
    return value
