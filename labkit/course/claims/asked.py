"""Runs code that needs torch in a separate process, because this process does not import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_HOME = str(Path(__file__).resolve().parents[3])
_TIMEOUT = 120.0  # seconds; the first import of torch from a cold disk is slow


def ask(code: str) -> tuple[Any, str]:
    """Runs Python code. Returns the JSON value of its last line of output, and the error as one line; one of them is
    empty."""
    path = os.pathsep.join(part for part in (_HOME, os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT:g} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode:
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return json.loads(lines[-1]), ""


BEHAVIOUR = "import json; from labkit.course.claims.in_torch.behaviour import behaviour; print(json.dumps(behaviour()))"
