"""The types of the pure packages: mypy in strict mode, as pyproject.toml configures it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.setup.environment import CLONE, PROJECT


def test_pure_packages_are_typed():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary"], cwd=CLONE, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_strict_mode_covers_the_pure_packages():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
    mypy = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["mypy"]
    assert mypy["strict"] is True
    assert {f"labkit.{name}" for name in ("common", "plan", "record", "analysis", "figures")} == set(mypy["packages"])
    excepted = {name for table in mypy["overrides"] if table.get("ignore_errors") for name in table["module"]}
    assert excepted <= {"labkit.figures.as_plotly"}
