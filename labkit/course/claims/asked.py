"""Questions to torch, asked in a process of their own: this one loads no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_HOME = str(Path(__file__).resolve().parents[3])
_LIMIT = 120.0  # seconds; a first import from a cold disk takes long


def ask(code: str) -> tuple[Any, str]:
    """What a piece of Python prints as its last line, which is JSON, and the error in one line; one of the two is empty."""
    path = os.pathsep.join(part for part in (_HOME, os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_LIMIT:g} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode:
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return json.loads(lines[-1]), ""
