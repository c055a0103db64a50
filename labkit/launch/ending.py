"""How the record of a run is closed: the summary, then the final status, also on a disk that is full."""

from __future__ import annotations

import json
import time
import traceback
from typing import Any

from labkit.analysis.summary import summarise
from labkit.record import clock
from labkit.record.appender import FULL, Reserve
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState

DISK_FULL = "the disk that holds the run folder was full"
_ROOM = 1 << 16  # bytes that one status needs at most, with what ranks write meanwhile
_NOTICES = 3 * _ROOM
_SUMMARY_ROOM = 1 << 17
_PATIENCE = 3.0  # seconds


def reserve(folder: RunFolder) -> None:
    """Reserves room on the disk for `make_room` and `conclude`. Raises `OSError` if the disk is full already."""
    Reserve(folder.reserve).make(_NOTICES + _SUMMARY_ROOM + _ROOM)


def make_room(folder: RunFolder) -> None:
    """Gives back the room for one status while the run is still under way; what `conclude` needs is kept."""
    kept = Reserve(folder.reserve)
    kept.shrink(max(kept.size - _ROOM, _SUMMARY_ROOM + _ROOM))


def conclude(folder: RunFolder, state: RunState, final: dict[str, Any]) -> None:
    """Writes the summary and then the final status, so that whoever sees the end finds the figures. No process may be left to compete."""
    kept = Reserve(folder.reserve)
    kept.shrink(_ROOM)
    for path in folder.reserves_of_ranks():
        Reserve(path).release()
    try:
        state.apply({"kind": "status", "status": final})
        _write_what_fits(folder, summarise(state, folder.name))
    except Exception:  # a summary that fails must not hide the state
        traceback.print_exc()
    kept.release()
    _write_final(folder, final)


def conclude_unattended(folder: RunFolder, state: str, message: str) -> None:
    """Closes the record of a run whose supervisor is gone; its processes must have ended."""
    follower = Follower(folder)
    follower.poll()
    status = RunFolder.read_json(folder.status)
    reference = RunFolder.read_json(folder.plan).get("env", {}).get(clock.VARIABLE, "")
    conclude(folder, follower.state, status | {"state": state, "message": message, "ended": clock.now(reference)})


def _write_final(folder: RunFolder, final: dict[str, Any]) -> None:
    """Writes the final status. Programs of others may take the room as well, so it is tried again for a while."""
    last = time.monotonic() + _PATIENCE
    while True:
        try:
            return RunFolder.write_json(folder.status, final)
        except OSError as error:
            if error.errno not in FULL or time.monotonic() > last:
                raise
        time.sleep(0.1)


def _write_what_fits(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Writes the summary; on a full disk without its longest parts, as many of them as it takes."""
    while True:
        try:
            return RunFolder.write_json(folder.summary, summary)
        except OSError as error:
            longest = max(summary, key=lambda name: len(json.dumps(summary[name])))
            if error.errno not in FULL or len(json.dumps(summary[longest])) < 100:
                raise
            summary = summary | {longest: type(summary[longest])()}  # empty, of the kind that readers expect
