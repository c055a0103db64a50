"""Bytes and counts in words."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def counted(number: int, thing: str, plural: str = "s") -> str:
    """`1 time`, `3 times`."""
    return f"{number:,} {thing}" + ("" if number == 1 else plural)


def size(count: float, digits: int = 1) -> str:
    """`3.1 MiB`, in the largest unit that leaves at least one; whole bytes have no digits."""
    power = min(len(_UNITS) - 1, int(math.log(max(abs(count), 1), 1024)))
    return f"{count / 1024**power:.{digits if power else 0}f} {_UNITS[power]}"
