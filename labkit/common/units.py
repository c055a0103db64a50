"""Formatting of bytes, counts and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def counted(number: int, thing: str, plural: str = "s") -> str:
    """`1 time`, `3 times`."""
    return f"{number:,} {thing}" + ("" if number == 1 else plural)


def ranks_in_words(numbers: Iterable[int], of: int | None = None) -> str:
    """`rank 3`, `ranks 0, 1`; `all 4 ranks` if these are all `of` ranks and there are several."""
    numbers = list(numbers)
    if of is not None and of > 1 and len(set(numbers)) == of:
        return f"all {of} ranks"
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


_NAMED = 8  # ranks in one sentence


def some_ranks(numbers: Sequence[int]) -> str:
    """As `ranks_in_words`; of many, the first eight and how many more there are."""
    more = f" and {len(numbers) - _NAMED:,} more" if len(numbers) > _NAMED else ""
    return ranks_in_words(numbers[:_NAMED]) + more


def listed(words: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: the first `most` words, and how many more there are."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def significant(value: float, digits: int = 3) -> str:
    """A number with at least `digits` significant digits, without zeros at its end: `40`, `52.3`, `1,234`, `0.00713`.
    A dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{min(decimals, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(count: float, digits: int = 1) -> str:
    """`3.1 MiB`, in the largest unit in which the value is at least 1; bytes have no decimals. A dash if the value is
    not finite."""
    if not math.isfinite(count):
        return "–"
    power = _power(count, digits)
    return f"{count / 1024**power:.{digits if power else 0}f} {_UNITS[power]}"


def milliseconds(seconds: float) -> str:
    """`0.153 ms`, `15.3 ms`, `1,530 ms`."""
    count = 1000 * seconds
    return f"{count:,.0f} ms" if count >= 100 else f"{count:.3g} ms"


def sizes(*counts: float) -> str:
    """Several sizes in one unit if all are at least 1 in it, `4.8 / 8.6 MiB`; otherwise in separate units, `4.6 MiB /
    1.9 GiB`."""
    known = [count for count in counts if math.isfinite(count)]
    power = max((_power(count) for count in known), default=0)
    if any(count and _power(count) < power for count in known):
        return " / ".join(map(size, counts))
    texts = [
        f"{count / 1024**power:.{1 if power and count else 0}f}" if math.isfinite(count) else "–" for count in counts
    ]
    return " / ".join(texts) + (f" {_UNITS[power]}" if known else "")


def scale(largest: float) -> tuple[float, str]:
    """The unit of an axis up to `largest` bytes: its size in bytes, and its name."""
    power = max(1, _power(largest)) if math.isfinite(largest) else 1
    return float(1024**power), _UNITS[power]


def _power(count: float, digits: int = 1) -> int:
    """The index of the unit in which the rounded value is at least 1 and less than 1024."""
    power = min(len(_UNITS) - 1, int(math.log(max(abs(count), 1), 1024)))
    if power < len(_UNITS) - 1 and round(abs(count) / 1024**power, digits if power else 0) >= 1024:
        power += 1
    return power
