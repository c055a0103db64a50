"""Profiles: how jobs are submitted at one site, from the sections `[profile NAME]` of the configuration files."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from labkit.common.arguments import shown
from labkit.setup import config

DEFAULT = "default"
_PREFIX = "profile "
# A time limit as sbatch reads it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.
_TIME = re.compile(r"\d+-\d+(:\d\d){0,2}|\d+(:\d\d){0,2}")
_WORD = re.compile(r"[^\s'\"`$\\;&|<>]+")


@dataclass(frozen=True)
class Profile:
    """The settings of one site. All are text; an empty one is left to the site's default.

    `time` is the limit in Slurm's format, `gpu` the type of GPU (Slurm's gres type, SkyPilot's accelerator), `cpus` the
    cores per rank, `container` the image in which the ranks run, `modules` environment modules, separated by spaces,
    and `setup` one line of shell that is run before them, such as `source /opt/venv/bin/activate`.
    """

    partition: str = ""
    account: str = ""
    time: str = "01:00:00"
    gpu: str = ""
    cpus: str = ""
    container: str = ""
    modules: str = ""
    setup: str = ""


def profile(name: str = DEFAULT) -> Profile:
    """The profile called `name`. Raises `ConfigError` for an unknown name or an invalid value."""
    found, known = {}, []
    for path in config.files():
        for title, values in config.sections(path).items():
            if title.startswith(_PREFIX):
                known.append(title.removeprefix(_PREFIX).strip())
                if known[-1] == name:
                    found |= _checked(path, title, values)
    if name not in (*known, DEFAULT):
        there = ", ".join(dict.fromkeys(known)) or "none yet"
        raise config.ConfigError(
            f"there is no profile {shown(name)}; add a section [profile {name}] to {config.user_file()} (profiles there"
            f" are: {there})"
        )
    return Profile(**found)


def _checked(path: object, title: str, values: dict[str, str]) -> dict[str, str]:
    config.check_names(path, title, values, (one.name for one in fields(Profile)))
    for name, value in values.items():
        if "\n" in value:
            raise config.ConfigError(f"{path}: {name} in [{title}] must be one line, got {shown(value)}")
        if name == "time" and not _TIME.fullmatch(value):
            raise config.ConfigError(
                f"{path}: time in [{title}] must be such as 01:30:00 or 2-00:00:00, got {shown(value)}"
            )
        if name == "cpus" and not (value.isascii() and value.isdigit() and int(value)):
            raise config.ConfigError(
                f"{path}: cpus in [{title}] must be a number of cores per rank, got {shown(value)}"
            )
        if name in ("partition", "account", "gpu", "container") and not _WORD.fullmatch(value):
            raise config.ConfigError(f"{path}: {name} in [{title}] must be one word, got {shown(value)}")
        if name == "modules" and not all(_WORD.fullmatch(word) for word in value.split()):
            raise config.ConfigError(
                f"{path}: modules in [{title}] must be names separated by spaces, got {shown(value)}"
            )
    return values
