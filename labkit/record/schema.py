"""Schemas of lists and objects, and the schema of a type: `shape_of` reads it from the annotations of a TypedDict.

The type that mypy checks, the check of the reader and the published JSON Schema are therefore one definition. Fields
that a type does not have are neither checked nor passed on.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from typing_extensions import NotRequired, get_type_hints, is_typeddict

from labkit.record.shapes import MISSING, Choice, Either, Flag, Null, Number, Shape, Text


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

    def json_schema(self) -> dict[str, Any]:
        return {
            "type": "array",
            "items": self.item.json_schema(),
            "minItems": self.least,
            "maxItems": self.most,
        }

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

    def json_schema(self) -> dict[str, Any]:
        items = [item.json_schema() for item in self.items]
        return {"type": "array", "prefixItems": items, "minItems": self.least, "maxItems": len(items)}

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        if type(value) is list and self.least <= len(value) <= len(self.items):
            yield from ((str(index), shape, item) for index, (shape, item) in enumerate(zip(self.items, value)))


@dataclass(frozen=True)
class Table(Shape):
    """An object of at most `most` entries whose values have one shape; with `numbers`, its names are integers below
    that, without leading zeros.
    """

    value: Shape
    most: int = 1_000
    numbers: int | None = None

    @property
    def words(self) -> str:
        names = f" named by whole numbers below {self.numbers:,}" if self.numbers is not None else ""
        return f"an object of at most {self.most:,} entries{names}"

    def expression(self, value: str, names: dict[str, Any]) -> str:
        check = _named(self.value.check, names)
        named = f" and all(map({_named(self._is_name, names)}, {value}))" if self.numbers is not None else ""
        return f"(type({value}) is dict and len({value}) <= {self.most}{named} and all(map({check}, {value}.values())))"

    def json_schema(self) -> dict[str, Any]:
        names = {} if self.numbers is None else {"propertyNames": {"pattern": f"^({_below(self.numbers)})$"}}
        values = {"additionalProperties": self.value.json_schema(), "maxProperties": self.most}
        return {"type": "object", **values, **names}

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        if type(value) is dict and len(value) <= self.most and (self.numbers is None or all(map(self._is_name, value))):
            yield from ((name, self.value, item) for name, item in value.items())

    @cached_property
    def _is_name(self) -> Callable[[str], object]:
        return re.compile(_below(self.numbers or 0)).fullmatch


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
    description: str = ""

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
        names: dict[str, Any] = {"missing": MISSING}
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
        compiled: Callable[[Any], bool] = names["check"]
        return compiled

    def json_schema(self) -> dict[str, Any]:
        fields = {
            name: Either((field.shape, Null())).json_schema() if field.null else field.shape.json_schema()
            for name, field in self.fields.items()
        }
        required = [name for name, field in self.fields.items() if field.required]
        return {
            **({"description": self.description} if self.description else {}),
            **({"$comment": f"it must be {self.words}"} if self.columns else {}),
            "type": "object",
            "properties": fields,
            **({"required": required} if required else {}),
        }

    def inside(self, value: Any) -> Iterator[tuple[str, Shape, Any]]:
        if type(value) is not dict:
            return
        for name, field in self.fields.items():
            found = value.get(name, MISSING)
            if not ((found is None and field.null) or (found is MISSING and not field.required)):
                yield name, field.shape, found

    def known(self, value: dict[str, Any]) -> dict[str, Any]:
        """A valid value without fields that have no shape."""
        if value.keys() <= self.fields.keys():
            return value
        return {name: one for name, one in value.items() if name in self.fields}


# ---- from types


@dataclass(frozen=True)
class Limits:
    """In an annotation of a list, an object or a tuple: most and fewest entries; see `Sequence`, `Table` and `Row`."""

    most: int | None = None
    least: int | None = None
    numbers: int | None = None


def shape_of(kind: Any) -> Shape:
    """The shape of a type: a TypedDict, `list[X]`, `dict[str, X]`, `tuple[X, Y]` (in JSON a list), `Literal`, a union,
    `bool`, `float` (any finite number), `str` or `None`.

    Of `Annotated[X, …]` it is the `Shape` among the annotations, or that of X within the `Limits` among them. Raises
    `TypeError` for any other type.
    """
    if is_typeddict(kind):
        return record_of(kind)
    limits, origin, args = Limits(), get_origin(kind), get_args(kind)
    if origin is Annotated:
        for note in args[1:]:
            if isinstance(note, Shape):
                return note
            limits = note if isinstance(note, Limits) else limits
        origin, args = get_origin(args[0]), get_args(args[0])
    if origin in (Union, types.UnionType):
        return Either(tuple(shape_of(one) for one in args))
    if origin is Literal:
        return Choice(args)
    if origin is list:
        most = Sequence.most if limits.most is None else limits.most
        return Sequence(shape_of(args[0]), most, limits.least or 0)
    if origin is tuple:
        return Row(tuple(shape_of(one) for one in args), len(args) if limits.least is None else limits.least)
    if origin is dict:
        return Table(shape_of(args[1]), Table.most if limits.most is None else limits.most, limits.numbers)
    plain: dict[Any, Shape] = {bool: Flag(), float: Number(), str: Text(), None: Null(), type(None): Null()}
    if kind not in plain:
        raise TypeError(f"{kind} has no shape")
    return plain[kind]


def record_of(kind: type) -> Record:
    """The shape of a TypedDict: a field with `NotRequired` may be missing, one with `| None` may be null."""
    fields = {}
    hints: dict[str, Any] = get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        required = get_origin(hint) is not NotRequired
        inner = hint if required else get_args(hint)[0]
        options = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
        shapes = tuple(shape_of(one) for one in options if one is not type(None))
        shape = shapes[0] if len(shapes) == 1 else Either(shapes)
        fields[name] = Field(shape, required, null=type(None) in options)
    return Record(fields, description=" ".join((kind.__doc__ or "").split()))


def _named(thing: Any, names: dict[str, Any]) -> str:
    name = f"_{len(names)}"
    names[name] = thing
    return name


def _below(end: int) -> str:
    """A regular expression of the decimal integers from 0 to `end` - 1, without leading zeros."""
    last = str(end - 1)
    parts = ["0"] + [rf"[1-9][0-9]{{{digits}}}" for digits in range(len(last) - 1)]
    for at, digit in enumerate(last):
        least = 0 if at else 1
        if int(digit) > least:
            parts.append(f"{last[:at]}[{least}-{int(digit) - 1}]" + f"[0-9]{{{len(last) - at - 1}}}")
    return "|".join(dict.fromkeys([*parts, last]))
