"""The status of a run as it is now: what the supervisor wrote, or, where the supervisor was lost, that it was."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import psutil

from labkit.launch.folder import RunFolder
from labkit.launch.processes import is_same, living, tag_of
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
    """The living supervisor of exactly this run; None where there is none on this host.

    It is known by its tag and its command: starting times shift when a clock is set, and are asked only where another user's
    process hides the rest.
    """
    who = status.get("supervisor") or {}
    process = living(who.get("pid")) if is_here(status) else None
    if process is None:
        return None
    tag = tag_of(process)
    if tag is None:
        return process if is_same(process, who) else None
    return process if is_folder(tag, folder) and _is_supervisor(process) else None


def is_folder(tag: str, folder: RunFolder) -> bool:
    """Whether a tag names this folder, and not one that it was copied from."""
    try:
        return Path(tag).samefile(folder.path)
    except OSError:
        return False


def _is_supervisor(process: psutil.Process) -> bool:
    try:
        return "labkit.launch.supervisor" in process.cmdline()
    except psutil.Error:
        return False
