"""What the lab needs and what a Python has of it, by the packages' metadata alone: nothing is imported, so it takes milliseconds.

Standard library only: this runs before there is an environment.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
PROJECT = CLONE / "pyproject.toml"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
VENV = CLONE / ".venv"

# What `labkit setup --with` adds: the extra of pyproject.toml, and the module by which it is found.
OPTIONAL = {"deepspeed": "deepspeed", "handout": "nbconvert", "mnist": "torchvision"}
# Compiled against one torch: a torchvision from elsewhere beside an environment's own torch does not load, so it is never added to one.
BUILT_FOR_TORCH = ("torchvision",)
# The kernel's half of what a JupyterLab already shows: a newer one than its front end does not draw, so it is never upgraded.
WIDGETS = ("anywidget", "ipywidgets", "plotly")

_HOSTED = {"KAGGLE_KERNEL_RUN_TYPE": "Kaggle's image", "COLAB_RELEASE_TAG": "Colab's image"}
_PEP440 = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Requirement:
    """A package and its lowest version, as pyproject.toml asks for it: `rich>=13.7`."""

    name: str
    minimum: str

    def __str__(self) -> str:
        return f"{self.name}>={self.minimum}"

    @property
    def installed(self) -> str | None:
        """The version that this Python has; None where it has none."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    @property
    def met(self) -> bool:
        """Whether this Python has it, in a version that serves."""
        version = self.installed
        return version is not None and release(version) >= release(self.minimum)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13) of `2.13.0+cpu`. Zeros at the end say nothing."""
    numbers = [int(number) for number in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if number]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def requirements(*extras: str) -> list[Requirement]:
    """The core dependencies of pyproject.toml and those of some extras. (Python 3.10 has no reader of TOML; these lists need none.)"""
    project, found = PROJECT.read_text(encoding="utf-8"), []
    for table in ("dependencies", *extras):
        block = re.search(rf"^{table} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)[1]
        found += [Requirement(*quoted.split(">=")) for quoted in re.findall(r'"(.+?)"', block)]
    return list(dict.fromkeys(found))


def missing(*extras: str) -> list[Requirement]:
    """What this Python lacks of core, torch and some extras. torchvision is no reason to change an environment: few need it."""
    return [wanted for wanted in requirements("torch", *extras) if wanted.name not in BUILT_FOR_TORCH and not wanted.met]


def torch_serves() -> bool:
    """Whether this Python has a torch of a version that the lab runs with."""
    return all(wanted.met for wanted in requirements("torch") if wanted.name == "torch")


def active() -> str | None:
    """The environment that somebody chose by making it current, in words; None where Python is the system's own."""
    if sys.prefix != sys.base_prefix:
        return f"the virtual environment {sys.prefix}"
    conda = os.environ.get("CONDA_PREFIX")
    if conda and Path(conda).resolve() == Path(sys.prefix).resolve():
        return f"the conda environment {conda}"
    return next((words for variable, words in _HOSTED.items() if variable in os.environ), None)


def has(extra: str) -> bool:
    """Whether the packages of an optional extra (a key of OPTIONAL) can be imported by this Python; nothing is imported."""
    return importlib.util.find_spec(OPTIONAL[extra]) is not None


def how_to_add(extra: str) -> str:
    """The end of a sentence that says what is missing: the command that adds it to the right environment."""
    return f"add it with: python3 -m labkit setup --with {extra}"


def why_not_added(extra: str) -> str:
    """Why a set-up that succeeded has left an optional extra out, and how to get it."""
    package = OPTIONAL[extra]
    if not PROJECT.is_file():
        return f"labkit is a package of {sys.prefix} and changes nothing there; install {package} with the tool that manages it"
    where = active() or f"the Python at {sys.prefix}"
    if package in BUILT_FOR_TORCH:
        return f"{package} must be built for the torch of {where} and is not added to it; install it from where that torch came from"
    return f"{package} was not added to {where}; install it there, or deactivate that environment and run setup again"


def is_own() -> bool:
    """Whether this Python is that of the clone's own `.venv`."""
    return Path(sys.prefix).resolve() == VENV.resolve()


def held(upgraded: set[str]) -> list[str]:
    """Constraints that hold every installed package at its version, but for those to be upgraded (by their names)."""
    lines = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version and _PEP440.fullmatch(version) and name.lower() not in upgraded:
            lines.setdefault(name.lower(), f"{name}=={version}")
    return sorted(lines.values())
