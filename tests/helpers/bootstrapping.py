"""Environments that the tests of the set-up pretend to have."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.setup import environment
from labkit.setup.environment import CONSTRAINTS, PROJECT, Requirement


class Handed(Exception):
    """The command was restarted in another Python: a stand-in for `os.execv`, which does not return."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A separate clone without an environment, whose pip and venv only record their calls."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for path in (PROJECT, CONSTRAINTS):
        shutil.copy(path, clone / path.name)
    venv = clone / ".venv"
    names = {
        **{"CLONE": clone, "VENV": venv, "PROJECT": clone / PROJECT.name, "CONSTRAINTS": clone / CONSTRAINTS.name},
        **{"STATE": venv / "labkit.json", "PINS": venv / "held.txt", "VENV_PYTHON": venv / "bin" / "python"},
    }
    for name, value in names.items():
        monkeypatch.setattr(environment, name, value)
    return clone


@pytest.fixture
def calls(place, monkeypatch):
    """The calls in order: ("create",), ("install", arguments), ("become", command)."""
    made: list[tuple] = []

    def create() -> None:
        made.append(("create",))
        shutil.rmtree(environment.VENV, ignore_errors=True)
        environment.VENV_PYTHON.parent.mkdir(parents=True)
        environment.VENV_PYTHON.symlink_to(sys.executable)

    def become(command, folder=None):
        made.append(("become", list(command)))
        raise Handed

    monkeypatch.setattr(environment, "_create", create)
    monkeypatch.setattr(environment, "_pip_for_venv", lambda: ["pip"])
    monkeypatch.setattr(
        environment, "_install", lambda pip, arguments, *rest: made.append(("install", list(arguments)))
    )
    monkeypatch.setattr(environment, "_runs", lambda command: environment.VENV_PYTHON.exists())
    monkeypatch.setattr(environment, "become", become)
    return made


def kept(folder: Path) -> Callable[[], bool]:
    """Fills a folder with an environment that someone else needs; the answer says whether it is still all there."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "precious.txt").write_text("precious")

    def names() -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

    before = names()
    return lambda: set(before) <= set(names()) and (folder / "precious.txt").read_text() == "precious"


def having(monkeypatch, *, lacks=(), torch=True, active=None, own=False):
    """Fakes the packages of this Python."""
    monkeypatch.setattr(environment, "missing", lambda *extras: [Requirement(name, "1") for name in lacks])
    monkeypatch.setattr(environment, "has_supported_torch", lambda: torch)
    monkeypatch.setattr(environment, "active", lambda: active)
    monkeypatch.setattr(environment, "is_own", lambda: own)
