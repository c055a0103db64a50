"""The current status of a run: as written by the supervisor, or failed or lost if no supervisor is left to write it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
from msgspec.structs import replace

from labkit.common.processes import here, is_same, is_supervisor, living, names, tag_of
from labkit.record.documents import Status, Who
from labkit.record.folder import RunFolder
from labkit.record.state import OVER
from labkit.record.steps import Block
from labkit.record.writer import steps_path

# Seconds without any activity after which a run on another host counts as lost; clocks of hosts may differ by less.
QUIET = 120.0
_YOUNG = 60.0  # seconds during which a folder without a status may belong to a run that is starting
_TAIL = 1 << 14  # bytes at the end of system.jsonl that are searched for its last sample


def current(folder: RunFolder) -> Status:
    """The contents of `status.json`; for a run with neither a final state nor a supervisor, `failed` or `lost`, and
    why.

    `failed`: the supervisor was a process of this host and is gone, and so are its ranks. `lost`: how the run ended is
    unknown here, because it ran on another host or in another folder.
    """
    if folder.is_gone:
        return Status("lost", message="its run folder no longer exists: it was deleted or moved")
    status = folder.read_status()
    why = _lost(folder, status)
    if not why:
        return status
    status = folder.read_status()  # the final status may have been written in the meantime
    return status if status.state in OVER else replace(status, state=why[0], message=why[1])


def is_over(folder: RunFolder) -> bool:
    """Whether a run has ended, or was interrupted before it had a status."""
    status = current(folder)
    if status.state != "ready":
        return status.state in OVER
    return time.time() - folder.path.stat().st_mtime > _YOUNG


def is_abandoned(folder: RunFolder) -> bool:
    """Whether a run of this host has no final status and no process is left to write one."""
    return (_lost(folder, folder.read_status()) or ("", ""))[0] == "failed"


def is_here(status: Status) -> bool:
    """Whether the pids in a status belong to this host, this boot and this container."""
    who, host, boot = status.supervisor, here()["host"], here()["boot"]
    return who is not None and (who.host, who.boot or boot) == (host, boot)


def supervisor_of(folder: RunFolder, status: Status) -> psutil.Process | None:
    """The living supervisor of exactly this run, identified by its tag and command; None if there is none on this
    host."""
    who = status.supervisor
    process = living(who.pid) if who and is_here(status) else None
    return process if process is not None and names(tag_of(process), folder.path) and is_supervisor(process) else None


def hidden_supervisor(status: Status) -> psutil.Process | None:
    """The living process with the pid and start time in a status, if this user may not read its tag. It must never be
    signalled.
    """
    who = status.supervisor
    process = living(who.pid) if who and is_here(status) else None
    return (
        process
        if who and process is not None and tag_of(process) is None and is_same(process, who.pid, who.create_time)
        else None
    )


def _lost(folder: RunFolder, status: Status) -> tuple[Literal["failed", "lost"], str] | None:
    """The state and the message of a status that will never be completed; None for a run that is over or under way."""
    if status.state in ("ready", *OVER):
        return None
    who = status.supervisor
    if who is None or not is_here(status):
        return _quiet(folder, who)
    if supervisor_of(folder, status) is not None or hidden_supervisor(status) is not None:
        return None
    place = _place_of(who)
    if place:  # a folder that was moved will soon get its final status
        return (
            ("lost", f"this folder is a copy of {place}, where the run is under way") if Path(place).is_dir() else None
        )
    if folder.read_launch().is_scheduled:
        return _quiet(folder, who)  # the job of a scheduler continues without it
    return "failed", f"its supervisor (pid {who.pid}) was killed, which ended the run"


def _place_of(who: Who) -> str:
    """The run folder of the living supervisor of a status; empty if it is gone."""
    process = living(who.pid)
    return (
        (tag_of(process) or "")
        if process is not None and is_same(process, who.pid, who.create_time) and is_supervisor(process)
        else ""
    )


# ---- runs of other hosts


def _quiet(folder: RunFolder, who: Who | None) -> tuple[Literal["lost"], str] | None:
    """A running run on another host writes a sample five times per second; a copy of its folder is not written."""
    sample, times = _last_sample(folder), _written(folder)
    if any(abs(time.time() - sign) < QUIET for sign in (*sample, *times)):
        return None
    when = _in_words(min([*sample, max(times)]))
    host = (who and who.host) or "an unknown host"
    return "lost", f"it ran on {host} and has written nothing since {when}; how it ended is unknown"


def _last_sample(folder: RunFolder) -> list[float]:
    """The time of the supervisor's last sample, by the clock of its host, if there is one."""
    reader = folder.reader(folder.system)
    reader.skip_to(_TAIL)
    return [event.t for event in list(reader.poll())[-1:] if not isinstance(event, Block)]


def _written(folder: RunFolder) -> list[float]:
    """Modification times of the files that change while a run is under way, by the clock of the file system."""
    times = []
    events = folder.event_files().values()
    for path in (folder.status, folder.system, *events, *map(steps_path, events)):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return times or [0.0]


def _in_words(seconds: float) -> str:
    if not 0 < seconds < 1 << 33:
        return "an unknown time"
    return time.strftime("%d %B %Y, %H:%M", time.localtime(seconds)).lstrip("0")
