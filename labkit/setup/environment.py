"""The requirements of the lab, and which of them this Python has, from package metadata only: it takes milliseconds,
without imports.

Standard library only, because this runs before the environment is set up.
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
RENDERER_VARIABLE, RENDERER = "PLOTLY_RENDERER", "plotly_mimetype"  # how plotly shows figures in a notebook: as data
PROJECT = CLONE / "pyproject.toml"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
VENV = CLONE / ".venv"
FIREFOX = ("firefox-esr", "firefox")  # for tests
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")  # for tests and benchmarks

# The extras of `labkit setup --with`, and the module that shows whether each is installed.
OPTIONAL = {
    "deepspeed": "deepspeed",
    "handout": "nh3",
    "kubeflow": "kubeflow",
    "mcp": "mcp",
    "mlflow": "mlflow",
    "mnist": "torchvision",
    "parquet": "pyarrow",
    "skypilot": "sky",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
# In place of extras: a command that only prints text, and the packages that such commands import.
TEXT_ONLY = "text-only"
_FOR_TEXT = ("filelock", "msgspec", "numpy", "nvidia-ml-py", "psutil", "pyyaml", "rich", "ruff")
# Compiled for one version of torch: a different build does not load with the torch of an existing environment, so it is
# never added.
BUILT_FOR_TORCH = ("torchvision",)
# Kernel packages that must match JupyterLab's front end: a newer version would not render, so they are never upgraded.
WIDGETS = ("anywidget", "ipywidgets", "plotly")

_HOSTED = {"KAGGLE_KERNEL_RUN_TYPE": "Kaggle's image", "COLAB_RELEASE_TAG": "Colab's image"}
_PEP440 = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Requirement:
    """A package, its minimum version and those that do not work, as in pyproject.toml: `rich>=13.7,!=14.0.0`."""

    name: str
    minimum: str
    unfit: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}>={self.minimum}{''.join(f',!={version}' for version in self.unfit)}"

    @classmethod
    def of(cls, text: str) -> Requirement:
        """Parses what `str` writes."""
        known, *unfit = text.split(",!=")
        name, minimum = known.split(">=")
        return cls(name, minimum, tuple(unfit))

    @property
    def installed(self) -> str | None:
        """The installed version; None if the package is not installed."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    @property
    def met(self) -> bool:
        """Whether the package is installed in a version that works."""
        version = self.installed
        return version is not None and version not in self.unfit and release(version) >= release(self.minimum)


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version, without trailing zeros: (2, 13) for `2.13.0+cpu`."""
    numbers = [int(number) for number in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if number]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def requirements(*extras: str) -> list[Requirement]:
    """The core dependencies of pyproject.toml and those of some extras, parsed by hand because Python 3.10 has no TOML
    parser. With TEXT_ONLY, only the core dependencies that commands import which print text."""
    project, found = PROJECT.read_text(encoding="utf-8"), []
    for table in ("dependencies", *(extra for extra in extras if extra != TEXT_ONLY)):
        block = re.search(rf"^{table} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)[1]
        found += [Requirement.of(quoted) for quoted in re.findall(r'"(.+?)"', block)]
    return [package for package in dict.fromkeys(found) if TEXT_ONLY not in extras or package.name in _FOR_TEXT]


def missing(*extras: str) -> list[Requirement]:
    """The missing requirements of core, torch and some extras, without torchvision, which few workloads need; or those
    of a command that only prints text."""
    wanted = requirements(*extras) if TEXT_ONLY in extras else requirements("torch", *extras)
    return [package for package in wanted if package.name not in BUILT_FOR_TORCH and not package.met]


def has_supported_torch() -> bool:
    """Whether this Python has a supported version of torch."""
    return all(package.met for package in requirements("torch") if package.name == "torch")


def active() -> str | None:
    """The active environment in words; None for the system's Python."""
    if sys.prefix != sys.base_prefix:
        return f"the virtual environment {sys.prefix}"
    conda = os.environ.get("CONDA_PREFIX")
    if conda and Path(conda).resolve() == Path(sys.prefix).resolve():
        return f"the conda environment {conda}"
    return next((words for variable, words in _HOSTED.items() if variable in os.environ), None)


def has(extra: str) -> bool:
    """Whether the packages of an optional extra (a key of OPTIONAL) can be imported by this Python; nothing is
    imported."""
    return importlib.util.find_spec(OPTIONAL[extra]) is not None


def how_to_add(extra: str) -> str:
    """The fix for a missing extra, as the end of a sentence: the command that adds it."""
    return f"add it with: python3 -m labkit setup --with {extra}"


def why_not_added(extra: str) -> str:
    """Why a successful setup did not install an optional extra, and the fix."""
    package = OPTIONAL[extra]
    if not PROJECT.is_file():
        return (
            f"labkit is installed as a package in {sys.prefix} and does not change it; install {package} with the tool"
            " that manages it"
        )
    where = active() or f"the Python at {sys.prefix}"
    if package in BUILT_FOR_TORCH:
        return (
            f"{package} must match the torch of {where}, so setup does not add it; install it from the same source as"
            " that torch"
        )
    return f"{package} was not added to {where}; install it there, or deactivate that environment and run setup again"


def is_own() -> bool:
    """Whether this Python belongs to the clone's own `.venv`; an environment that is only linked there is not its
    own."""
    return not VENV.is_symlink() and Path(sys.prefix).resolve() == VENV.resolve()


def pinned(upgraded: set[str]) -> list[str]:
    """Constraints that pin every installed package to its version, except the ones to be upgraded (by name)."""
    lines = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version and _PEP440.fullmatch(version) and name.lower() not in upgraded:
            lines.setdefault(name.lower(), f"{name}=={version}")
    return sorted(lines.values())
