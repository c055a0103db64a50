"""Warm starts: a server of one test, and how a run was started."""

from __future__ import annotations

import threading
from pathlib import Path

import labkit
from labkit.runs.handle import AFTER, Run, run

CLONE = Path(labkit.__file__).parents[1]

ENDS = "print('done')\n"


def started(path: Path, **fields: object) -> Run:
    """A finished run of a script on one rank. A warm server that it wants belongs to this test, not to the next one."""
    handle = run(path, **{"nproc": 1, "device": "cpu"} | fields).wait(120)
    assert handle.words == "finished", handle.logs(0, "stderr")
    for thread in threading.enumerate():
        if thread.name == AFTER:
            thread.join(10)
    return handle


def how(handle: Run) -> tuple[str, str]:
    status = handle.state.status
    return status.start, status.cold_because
