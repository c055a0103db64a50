"""Warm starts: a server of one test, and how a run was started."""

from __future__ import annotations

from pathlib import Path

import labkit
from labkit.runs.handle import Run, run

CLONE = Path(labkit.__file__).parents[1]

ENDS = "print('done')\n"


def started(path: Path, **fields: object) -> Run:
    """A finished run of a script on one rank."""
    handle = run(path, **{"nproc": 1, "device": "cpu"} | fields).wait(120)
    assert handle.words == "finished", handle.logs(0, "stderr")
    return handle


def how(handle: Run) -> tuple[str, str]:
    status = handle.state.status
    return status.start, status.cold_because
