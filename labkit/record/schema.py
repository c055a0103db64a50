"""Schemas of JSON values, declared as data and compiled to checks.

A shape defines which JSON values are valid. `check` is one compiled function per shape (about 2 µs for a step event),
and `problem` explains in one clause why a value is invalid. Fields without a shape are neither checked nor passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_SHOWN = 60  # characters of an invalid value that a clause quotes
_MISSING = object()


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

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        """The name, shape and value of each part of `value`; nothing if the type of `value` itself is wrong."""
        return iter(())

    @cached_property
    def check(self) -> Callable[[Any], bool]:
        """Whether a value is valid; never raises for JSON values."""
        names: dict[str, Any] = {}
        return eval(f"lambda value: {self.expression('value', names)}", names)

    def problem(self, value: Any, name: str) -> str:
        """Why `value` is invalid, as a clause that starts with its `name`."""
        for part, shape, found in self.inside(value):
            if not shape.check(found):
                return shape.problem(found, f"{name}.{part}" if name else part)
        return (
            f"{name or 'it'} must be {self.words},"
            f" {'but it is missing' if value is _MISSING else f'got {_quoted(value)}'}"
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


@dataclass(frozen=True)
class Flag(Shape):
    """True or false."""

    words = "true or false"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"(type({value}) is bool)"


@dataclass(frozen=True)
class Choice(Shape):
    """One of several texts."""

    options: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.options)}"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"(type({value}) is str and {value} in {self.options!r})"


@dataclass(frozen=True)
class Anything(Shape):
    """Any JSON value, within the limits of the parser."""

    words = "any value"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return "True"


@dataclass(frozen=True)
class Null(Shape):
    """Null, for a position of a row that may be unknown."""

    words = "null"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"({value} is None)"


@dataclass(frozen=True)
class Either(Shape):
    """A value of one of several shapes."""

    shapes: tuple[Shape, ...]

    @property
    def words(self) -> str:
        return ", or ".join(shape.words for shape in self.shapes)

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"({' or '.join(shape.expression(value, names) for shape in self.shapes)})"


@dataclass(frozen=True)
class Sequence(Shape):
    """A list of `least` to `most` values of one shape."""

    item: Shape
    most: int = 100_000
    least: int = 0

    @property
    def words(self) -> str:
        return f"a list of {self.least:,} to {self.most:,} values"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        check = _named(self.item.check, names)
        return f"(type({value}) is list and {self.least} <= len({value}) <= {self.most} and all(map({check}, {value})))"

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        if type(value) is list and self.least <= len(value) <= self.most:
            yield from ((str(index), self.item, item) for index, item in enumerate(value))


@dataclass(frozen=True)
class Row(Shape):
    """A list with one shape per position; the first `least` positions are required."""

    items: tuple[Shape, ...]
    least: int

    @property
    def words(self) -> str:
        return f"a list of {self.least} to {len(self.items)} values"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        checks = _named(tuple(item.check for item in self.items), names)
        size = f"{self.least} <= len({value}) <= {len(self.items)}"
        return f"(type({value}) is list and {size} and all(check(one) for check, one in zip({checks}, {value})))"

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        if type(value) is list and self.least <= len(value) <= len(self.items):
            yield from ((str(index), shape, item) for index, (shape, item) in enumerate(zip(self.items, value)))


@dataclass(frozen=True)
class Table(Shape):
    """An object of at most `most` entries whose values have one shape; with `numbers`, its names are integers below
    that.
    """

    value: Shape
    most: int = 1_000
    numbers: int | None = None

    @property
    def words(self) -> str:
        names = f" named by whole numbers below {self.numbers:,}" if self.numbers is not None else ""
        return f"an object of at most {self.most:,} entries{names}"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        check, keys = _named(self.value.check, names), _named(self._are_names, names)
        named = f" and {keys}({value})" if self.numbers is not None else ""
        return f"(type({value}) is dict and len({value}) <= {self.most}{named} and all(map({check}, {value}.values())))"

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        if type(value) is dict and len(value) <= self.most and (self.numbers is None or self._are_names(value)):
            yield from ((name, self.value, item) for name, item in value.items())

    def _are_names(self, names: Mapping[str, Any]) -> bool:
        return all(
            name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < self.numbers for name in names
        )


@dataclass(frozen=True)
class Field:
    """A field of a record: it may be missing unless it is `required`, and with `null` its value may be null."""

    shape: Shape
    required: bool = True
    null: bool = False


@dataclass(frozen=True)
class Record(Shape):
    """An object with named fields. `columns` names a list and an object of lists that must have equally many values."""

    fields: Mapping[str, Field]
    columns: tuple[str, str] | None = None

    @property
    def words(self) -> str:
        return (
            f"an object whose {self.columns[1]} have as many values as {self.columns[0]}"
            if self.columns
            else "an object"
        )

    def expression(self, value: str, names: dict[str, Any]) -> str:
        return f"{_named(self.check, names)}({value})"

    @cached_property
    def check(self) -> Callable[[Any], bool]:
        names: dict[str, Any] = {"missing": _MISSING}
        lines = ["def check(value):", " if type(value) is not dict: return False", " get = value.get"]
        for name, field in self.fields.items():
            lines.append(f" one = get({name!r}, missing)")
            absent = [] if field.required else ["one is missing"]
            absent += ["one is None"] if field.null else []
            lines.append(f" if not ({' or '.join([*absent, field.shape.expression('one', names)])}): return False")
        if self.columns:
            index, columns = self.columns
            lines.append(
                f" if any(len(column) != len(value[{index!r}]) for column in value[{columns!r}].values()): return False"
            )
        exec("\n".join([*lines, " return True"]), names)
        return names["check"]

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        if type(value) is not dict:
            return
        for name, field in self.fields.items():
            found = value.get(name, _MISSING)
            if not ((found is None and field.null) or (found is _MISSING and not field.required)):
                yield name, field.shape, found

    def known(self, value: dict[str, Any]) -> dict[str, Any]:
        """A valid value without fields that have no shape."""
        if value.keys() <= self.fields.keys():
            return value
        return {name: one for name, one in value.items() if name in self.fields}


def record(
    required: Mapping[str, Shape] | None = None,
    optional: Mapping[str, Shape] | None = None,
    null: Mapping[str, Shape] | None = None,
    **nullable: Shape,
) -> Record:
    """A record of `required` fields; `optional` ones may be missing, `null` ones may be null, `nullable` ones may be
    either.
    """
    fields = {name: Field(shape) for name, shape in (required or {}).items()}
    fields |= {name: Field(shape, required=False) for name, shape in (optional or {}).items()}
    fields |= {name: Field(shape, null=True) for name, shape in (null or {}).items()}
    return Record(fields | {name: Field(shape, required=False, null=True) for name, shape in nullable.items()})


def _named(thing: Any, names: dict[str, Any]) -> str:
    name = f"_{len(names)}"
    names[name] = thing
    return name


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
