"""The schema of each kind of event, and the parser of one line. Events that pass need no further checks.

The types in `labkit.record.types` are the definitions. Kinds without one pass with any fields, so that folders of newer
versions open.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias, cast, get_args

from typing_extensions import get_type_hints

from labkit.record.plain import parse
from labkit.record.schema import Record, record_of
from labkit.record.types.envelope import Unknown
from labkit.record.types.measured import Measured
from labkit.record.types.observed import Other, Seen
from labkit.record.types.reported import Reported

Event: TypeAlias = Measured | Reported | Seen


def _by_name(kinds: Any, field: str) -> dict[str, Record]:
    """The records of a union of types, by the one value that `field` has in each of them."""
    return {get_args(get_type_hints(kind)[field])[0]: record_of(kind) for kind in get_args(kinds)}


EVENTS = {**_by_name(Measured, "kind"), **_by_name(Reported, "kind"), "saw": record_of(Other)}
EVENTS["memory_step"] = replace(EVENTS["memory_step"], columns=("times", "owners"))
SAW = _by_name(Seen, "what")  # observations, by `what`
UNKNOWN = record_of(Unknown)


def event(line: bytes) -> Event | None:
    """The event of one line, with the fields of its type; None for an invalid event."""
    try:
        value = parse(line)
    except ValueError:
        return None
    return checked(value)


def checked(value: Any) -> Event | None:
    """The same for a parsed value. An event of an unknown kind is passed as it is."""
    if type(value) is not dict:
        return None
    kind = value.get("kind")
    shape = EVENTS.get(kind) if type(kind) is str else None
    if shape is None:
        return cast(Event, value) if UNKNOWN.check(value) else None
    if kind == "saw" and shape.check(value):
        shape = SAW.get(value["what"])
        if shape is None:
            return cast(Event, value)  # an observation of a newer version
    return cast(Event, shape.known(value)) if shape.check(value) else None
