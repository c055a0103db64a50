"""Mutations of a recorded file: one value, name, byte or line changed, by hostile values from a table."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Iterator
from typing import Any

from labkit.record.events import parse


class _Raw(str):
    """Verbatim JSON that `json.dumps` would not write."""


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", "x", "two", "0", "999999999", 0, 1, -1, 3, 7, 0.5, -0.5, 1e18, 1e308, -1e308, 5e-324),
    *(1_000_000, 2**31, 2**53, 2**63, 2**64, float("nan"), float("inf"), float("-inf")),
    *(
        _Raw("1e400"),
        _Raw("9" * 400),
        _Raw("9" * 10_000),
        _Raw("[" * 100_000 + "]" * 100_000),
        _Raw('{"x":' * 500 + "1" + "}" * 500),
    ),
    *(
        [],
        {},
        [[]],
        {"x": {}},
        [None],
        [1, 2, 3],
        ["x"],
        {"0": 1},
        {"0": None},
        {"-1": {}},
        {"1e9": 1},
        [[1, 2], [3]],
        [0.0] * 2_000,
    ),
    *(
        "\x1b]52;c;aGk=\x07",
        "\x1b]8;;http://x\x1b\\",
        "\u202etxt.exe",
        "\ud800",
        "\0",
        "../../../etc/passwd",
        "<script>x</script>",
    ),
    *("a" * 20_000, "\n\n", "cuda:1", "cuda:x", "cpu", "٣", "NaN", "%s%n{0}{x!r}"),
)

_NUMBERS = (
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    -1.0,
    0.5,
    1e18,
    1e308,
    -1e308,
    5e-324,
    2.0**53,
    2.0**63,
    2.0**64,
    3e10,
    1e11,
)


# ---- mutations


def mutated(content: bytes, suffix: str, chance: random.Random) -> bytes:
    """A file with one to four mutations: a value, a name, bytes, a truncated, repeated or moved line, or a missing end.

    A document (`suffix` .json) is one line, a step file is one line and its records.
    """
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        lines = content.split(b"\n", {".json": 0, ".steps": 1}.get(suffix, -1))
        at = chance.randrange(len(lines))
        if suffix == ".steps" and at:
            how = chance.choice((_column, _column, _column, _bytes, _cut))
        else:
            how = chance.choice((_value, _value, _value, _value, _name, _bytes, _cut, _doubled, _moved, _end))
        content = b"\n".join(how(lines, at, chance))
    return content


def _value(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    """A hostile value instead of any value."""
    value = _parsed(lines[at])
    places = list(_places(value))
    if places:
        holder, key = chance.choice(places)
        holder[key] = chance.choice(HOSTILE)
        lines[at] = _dumped(value)
    return lines


def _name(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    """A field that is missing or renamed."""
    value = _parsed(lines[at])
    places = [(holder, key) for holder, key in _places(value) if isinstance(holder, dict)]
    if places:
        holder, key = chance.choice(places)
        found = holder.pop(key)
        if chance.random() < 0.5:
            holder[chance.choice(("x", "", "0", "-1", "rank", "\x1b[2J"))] = found
        lines[at] = _dumped(value)
    return lines


def _column(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    """A hostile number in a record of a step file."""
    data, number = bytearray(lines[at]), struct.pack("<d", chance.choice(_NUMBERS))
    # also misaligned: a different number if a column has four bytes
    place = 4 * chance.randrange(max(1, len(data) // 4 - 1))
    data[place : place + 8] = number
    return [*lines[:at], bytes(data)]


def _bytes(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    line = bytearray(lines[at] or b" ")
    for _ in range(chance.randint(1, 4)):
        line[chance.randrange(len(line))] = chance.randrange(256)
    return [*lines[:at], bytes(line), *lines[at + 1 :]]


def _cut(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    return [*lines[:at], lines[at][: chance.randrange(len(lines[at]) + 1)], *lines[at + 1 :]]


def _doubled(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    return [*lines[:at], *[lines[at]] * chance.randint(2, 50), *lines[at + 1 :]]


def _moved(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    rest = [*lines[:at], *lines[at + 1 :]]
    to = chance.randrange(len(rest) + 1)
    return [*rest[:to], lines[at], *rest[to:]]


def _end(lines: list[bytes], at: int, chance: random.Random) -> list[bytes]:
    return lines[:at]


def _parsed(line: bytes) -> Any:
    """The value of a line; None if an earlier mutation made it invalid."""
    try:
        return parse(line)
    except ValueError:
        return None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every position inside a value that can be replaced, as container and key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _dumped(value: Any) -> bytes:
    raw: list[str] = []

    def kept(one: Any) -> Any:
        if isinstance(one, _Raw):
            raw.append(one)
            return f"@raw{len(raw) - 1}@"
        if isinstance(one, dict):
            return {name: kept(each) for name, each in one.items()}
        return [kept(each) for each in one] if isinstance(one, list) else one

    text = json.dumps(kept(value))
    return re.sub(r'"@raw(\d+)@"', lambda match: raw[int(match[1])], text).encode()
