"""What a machine can judge of the style: ruff's rules and format over the whole tree."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.setup.environment import CLONE


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_finds_nothing(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command], cwd=CLONE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
