"""The status of a run as it is now: what the supervisor wrote, or, where the supervisor was lost, that it was."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import psutil

from labkit.launch.folder import RunFolder
from labkit.launch.processes import living, tag_of
from labkit.state import OVER


def current(folder: RunFolder) -> dict[str, Any]:
    """What `status.json` says; a run of this host that has no final state and no supervisor any more reads as failed."""
    status = RunFolder.read_json(folder.status)
    if not is_lost(folder, status):
        return status
    status = RunFolder.read_json(folder.status)  # it may have written its last word between the two looks
    if status.get("state") in OVER:
        return status
    pid = status["supervisor"]["pid"]
    return status | {"state": "failed", "message": f"its supervisor (pid {pid}) was ended from outside, and the run with it"}


def is_lost(folder: RunFolder, status: dict[str, Any]) -> bool:
    """Whether `status` has no final state and nobody is left to write one."""
    unfinished = bool(status) and status.get("state") not in OVER
    return unfinished and is_here(status) and supervisor_of(folder, status) is None


def is_here(status: dict[str, Any]) -> bool:
    """Whether the run's processes are this host's."""
    return (status.get("supervisor") or {}).get("host") == socket.gethostname()


def supervisor_of(folder: RunFolder, status: dict[str, Any]) -> psutil.Process | None:
    """The living supervisor of exactly this run, by pid, start time and tag; None where there is none on this host."""
    process = living(status.get("supervisor") or {}) if is_here(status) else None
    if process is None:
        return None
    tag = tag_of(process)
    return process if tag is None or _same(tag, folder.path) else None


def _same(tag: str, path: Path) -> bool:
    try:
        return Path(tag).samefile(path)
    except OSError:
        return False
