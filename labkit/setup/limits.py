"""The limits of runs on this machine, from the sections `[limits]` and `[limits USER]` of its configuration file, and
from `[limits]` of the user's own file, which can only be stricter."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.common.arguments import Number, shown
from labkit.setup import config

_SECTION = "limits"
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_HOURS = Number(float, 0.001, 8760.0)
_COUNT = Number(int, 1, 65_536)
# CPU ranks that this machine runs at once, per core: several runs of the most ranks that one may have, so that only a
# crowd has to wait, and few enough that their memory (0.3 GB per rank) does not fill the machine.
_SLOTS_PER_CORE, _FEWEST_SLOTS = 16, 64


@dataclass(frozen=True)
class Limits:
    """`hours`: the longest run; `ranks`: the most of one run; `disk`: bytes of all runs in a folder; `cpu_slots`: CPU
    ranks at once, of all users. None: no limit, or the default. `sources` names the file and section of each."""

    hours: float | None = None
    ranks: int | None = None
    disk: int | None = None
    cpu_slots: int | None = None
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """The CPU ranks that run at once on this machine."""
        return self.cpu_slots or max(_FEWEST_SLOTS, _SLOTS_PER_CORE * (os.cpu_count() or 1))


def in_force() -> Limits:
    """The limits of this user on this machine. Raises `config.ConfigError`."""
    found: dict[str, float] = {}
    sources: dict[str, str] = {}
    for path, titles in (
        (config.SYSTEM, (_SECTION, f"{_SECTION} {user_name()}")),
        (config.user_file(), (_SECTION,)),
    ):
        there = config.sections(path)
        of_file = {name: (value, title) for title in titles for name, value in there.get(title, {}).items()}
        config.check_names(path, _SECTION, of_file, READ)
        for name, (text, title) in of_file.items():
            value = _read(path, title, name, text)
            if name not in found or path == config.SYSTEM or value < found[name]:
                found[name], sources[name] = value, f"{path} [{title}]"
    return Limits(**found, sources=sources)  # type: ignore[arg-type]


def user_name() -> str:
    """The name of this user; the number for one without a name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _read(path: Path, title: str, name: str, text: str) -> float:
    try:
        return READ[name](name, text)
    except ValueError as error:
        raise config.ConfigError(f"{path} [{title}]: {error}") from None


def _size(name: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([MGT]i?B)", text.strip(), re.ASCII)
    if found is None:
        raise ValueError(f"{name} must be a size such as 20 GB, got {shown(text)}")
    return int(float(found[1]) * _UNITS[found[2]])


READ: dict[str, Callable[[str, str], float]] = {
    "hours": _HOURS.read,
    "ranks": _COUNT.read,
    "disk": _size,
    "cpu_slots": _COUNT.read,
}
