"""The configuration files of this machine and of this user, in INI format: `/etc/labkit.conf` and
`~/.config/labkit.conf`.

A section is read from both files, and the user's values come after those of the machine. Standard library only.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterable
from pathlib import Path

from labkit.common.arguments import shown
from labkit.common.reading import read_regular

_LARGEST = 1 << 20  # bytes
SYSTEM = Path("/etc/labkit.conf")


class ConfigError(ValueError):
    """A configuration file is invalid; the message is one sentence with file, section, name and fix."""


def user_file() -> Path:
    """The configuration file of this user."""
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
