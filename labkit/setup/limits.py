"""The configuration files of this machine and of this user, and the limits of runs that they set."""

from __future__ import annotations

import configparser
import getpass
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.common.arguments import Number, shown
from labkit.common.files import read_regular

# ---- the configuration files


_LARGEST = 1 << 20  # bytes
SYSTEM = Path("/etc/labkit.conf")


class ConfigError(ValueError):
    """A configuration file is invalid; the message is one sentence with file, section, name and fix."""


def user_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "labkit.conf"


def sections(path: Path) -> dict[str, dict[str, str]]:
    """The sections of one file with their values as text; empty if there is no such file. Raises `ConfigError`."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(read_regular(path, _LARGEST).decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (configparser.Error, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a valid configuration file: {why}") from None
    return {name: dict(parser[name]) for name in parser.sections()}


def files() -> list[Path]:
    """The two files, the machine's first."""
    return [SYSTEM, user_file()]


def check_names(path: Path, section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises `ConfigError` for a name that a section must not have."""
    allowed = list(known)
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{path}: [{section}] has no {shown(name)}; it may have: {', '.join(allowed)}")


# ---- the limits of runs


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
    """The limits of this user on this machine. Raises `ConfigError`."""
    found: dict[str, float] = {}
    sources: dict[str, str] = {}
    for path, titles in ((SYSTEM, (_SECTION, f"{_SECTION} {user_name()}")), (user_file(), (_SECTION,))):
        there = sections(path)
        of_file = {name: (value, title) for title in titles for name, value in there.get(title, {}).items()}
        check_names(path, _SECTION, of_file, READ)
        for name, (text, title) in of_file.items():
            value = _read(path, title, name, text)
            if name not in found or path == SYSTEM or value < found[name]:
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
        raise ConfigError(f"{path} [{title}]: {error}") from None


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
