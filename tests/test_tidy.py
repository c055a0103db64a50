"""The size of modules: a reader holds about 300 lines in mind."""

from __future__ import annotations

from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent.parent
MODULES = sorted(
    path for folder in ("labkit", "tests") for path in (ROOT / folder).rglob("*.py") if "recorded" not in path.parts
)
MOST = 300  # lines of a module


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_has_at_most_300_lines(path):
    assert lines(path) <= MOST, "split it by what changes together"
