"""Shapes of JSON values: which values are valid, declared as data. Here are single values; `schema.py` has lists and
objects.

`check` of a shape is one compiled function (about 2 µs for a step event), `problem` explains in one clause why a value
is invalid, and `json_schema` says the same as JSON Schema (draft 2020-12). What JSON Schema cannot express is in a
`$comment`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_SHOWN = 60  # characters of an invalid value that a clause quotes
MISSING = object()  # the value of a required field that is absent


@dataclass(frozen=True)
class Shape:
    """The base of all shapes. `words` completes the sentence "NAME must be …"."""

    @property
    def words(self) -> str:
        raise NotImplementedError

    def expression(self, value: str, names: dict[str, Any]) -> str:
        """A Python expression that is true if the variable `value` is valid; objects that it needs are added to
        `names`.
        """
        raise NotImplementedError

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the valid values."""
        raise NotImplementedError

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        """The name, shape and value of each part of `value`; nothing if the type of `value` itself is wrong."""
        return iter(())

    @cached_property
    def check(self) -> Callable[[Any], bool]:
        """Whether a value is valid; never raises for JSON values."""
        names: dict[str, Any] = {}
        compiled: Callable[[Any], bool] = eval(f"lambda value: {self.expression('value', names)}", names)
        return compiled

    def problem(self, value: Any, name: str) -> str:
        """Why `value` is invalid, as a clause that starts with its `name`."""
        for part, shape, found in self.inside(value):
            if not shape.check(found):
                return shape.problem(found, f"{name}.{part}" if name else part)
        return (
            f"{name or 'it'} must be {self.words},"
            f" {'but it is missing' if value is MISSING else f'got {_quoted(value)}'}"
        )


@dataclass(frozen=True)
class Number(Shape):
    """A number from `least` to `most`; with `whole`, integers only; NaN and infinities are valid only with
    `any_float`."""

    least: float = -1e300
    most: float = 1e300
    whole: bool = False
    any_float: bool = False

    @property
    def words(self) -> str:
        if self.any_float or self.least <= -1e300:
            return "a number" if self.any_float else "a finite number"
        return f"{'an integer' if self.whole else 'a number'} from {_plain(self.least)} to {_plain(self.most)}"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        if self.any_float:  # bounds only keep integers within what a float can hold
            return f"(type({value}) is float or (type({value}) is int and {self.least!r} <= {value} <= {self.most!r}))"
        kind = f"type({value}) is int" if self.whole else f"(type({value}) is float or type({value}) is int)"
        return f"({kind} and {self.least!r} <= {value} <= {self.most!r})"

    def json_schema(self) -> dict[str, Any]:
        if self.any_float:
            return {"type": "number", "$comment": "or NaN, Infinity or -Infinity, as Python's json module writes them"}
        return {"type": "integer" if self.whole else "number", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Text(Shape):
    """A text of at most `most` characters; `inline` text (names and paths) contains no NUL."""

    most: int | None = None
    inline: bool = False

    @property
    def words(self) -> str:
        limit = f" of at most {self.most:,} characters" if self.most is not None else ""
        return f"a text{limit}{' without NUL' if self.inline else ''}"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        limit = f" and len({value}) <= {self.most}" if self.most is not None else ""
        inline = f" and '\\0' not in {value}" if self.inline else ""
        return f"(type({value}) is str{limit}{inline})"

    def json_schema(self) -> dict[str, Any]:
        limit = {} if self.most is None else {"maxLength": self.most}
        return {"type": "string", **limit} | ({"pattern": r"^[^\x00]*$"} if self.inline else {})


@dataclass(frozen=True)
class Flag(Shape):
    """True or false."""

    @property
    def words(self) -> str:
        return "true or false"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"(type({value}) is bool)"

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Choice(Shape):
    """One of several texts."""

    options: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.options)}"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"(type({value}) is str and {value} in {self.options!r})"

    def json_schema(self) -> dict[str, Any]:
        return {"enum": list(self.options)}


@dataclass(frozen=True)
class Null(Shape):
    """Null, for a position of a row that may be unknown."""

    @property
    def words(self) -> str:
        return "null"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"({value} is None)"

    def json_schema(self) -> dict[str, Any]:
        return {"type": "null"}


@dataclass(frozen=True)
class Either(Shape):
    """A value of one of several shapes."""

    shapes: tuple[Shape, ...]

    @property
    def words(self) -> str:
        return ", or ".join(shape.words for shape in self.shapes)

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"({' or '.join(shape.expression(value, names) for shape in self.shapes)})"

    def json_schema(self) -> dict[str, Any]:
        return {"anyOf": [shape.json_schema() for shape in self.shapes]}


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) or abs(number) >= 1e15 else f"{number:,}"


def _quoted(value: Any) -> str:
    """An invalid value as it was written, truncated; repr escapes control characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of about {value.bit_length() * math.log10(2):.0f} digits"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
