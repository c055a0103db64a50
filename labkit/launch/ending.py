"""The end of a run: what its processes leave behind, its final record, and runs whose supervisor is gone."""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import suppress

from msgspec.structs import replace

from labkit.analysis.summary import summarise
from labkit.common.processes import of_folder
from labkit.launch.watchdog import end_all
from labkit.record import clock
from labkit.record.documents import State, Status, Summary, Unreadable, plain
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, current_status
from labkit.record.state import OVER, RunState
from labkit.record.writer import FULL, Reserve

# ---- closing the record


DISK_FULL = "the disk that holds the run folder was full"
_ROOM = 1 << 16  # maximum bytes of one status, with what ranks may write at the same time
_NOTICES = 3 * _ROOM
_SUMMARY_ROOM = 1 << 17
_PATIENCE = 3.0  # seconds


def reserve(folder: RunFolder) -> None:
    """Reserves disk space for `make_room` and `conclude`. Raises `OSError` if the disk is already full."""
    Reserve(folder.reserve).make(_NOTICES + _SUMMARY_ROOM + _ROOM)


def make_room(folder: RunFolder) -> None:
    """Releases the space for one status while the run is active; the space for `conclude` stays reserved."""
    kept = Reserve(folder.reserve)
    kept.shrink(max(kept.size - _ROOM, _SUMMARY_ROOM + _ROOM))


def conclude(folder: RunFolder, state: RunState, final: Status) -> None:
    """Writes the summary, then the final status, so that a finished run always has its figures. All processes must have
    ended.
    """
    kept = Reserve(folder.reserve)
    kept.shrink(_ROOM)
    for path in folder.reserves_of_ranks():
        Reserve(path).release()
    try:
        state.apply(final)
        _write_what_fits(folder, summarise(state, folder.name))
    except Exception:  # a summary that fails must not hide the state
        traceback.print_exc()
    kept.release()
    _write_final(folder, final)


def conclude_unattended(folder: RunFolder, state: State, message: str) -> None:
    """Closes the record of a run without a supervisor; its processes must have ended."""
    follower = Follower(folder)
    follower.poll()
    status = folder.read_status()
    reference = folder.read_launch().env.get(clock.VARIABLE, "")
    conclude(folder, follower.state, replace(status, state=state, message=message, ended=clock.now(reference)))


def _write_final(folder: RunFolder, final: Status) -> None:
    """Writes the final status. Other programs may use up the released space, so it retries for a while."""
    last = time.monotonic() + _PATIENCE
    while True:
        try:
            return RunFolder.write_json(folder.status, final)
        except OSError as error:
            if error.errno not in FULL or time.monotonic() > last:
                raise
        time.sleep(0.1)


def _write_what_fits(folder: RunFolder, figures: Summary) -> None:
    """Writes the summary; on a full disk it drops the longest parts until the rest fits."""
    summary = plain(figures)
    while True:
        try:
            return RunFolder.write_json(folder.summary, summary)
        except OSError as error:
            longest = max(summary, key=lambda name: len(json.dumps(summary[name])))
            if error.errno not in FULL or len(json.dumps(summary[longest])) < 100:
                raise
            summary = summary | {longest: type(summary[longest])()}  # empty, but of the type that readers expect


# ---- runs without a supervisor


_NOT_STARTED = "the processes that started it were killed before it began"


def end_processes(folder: RunFolder) -> None:
    """Kills the processes of the run and removes what they leave outside of its folder, which may have been deleted."""
    ranks: list[int] = []
    with suppress(Unreadable):
        ranks += (folder.read_status().ranks or {}).values()
    end_all(folder.path, lambda: of_folder(folder.path), grace=0.0, known=ranks)


def close(folder: RunFolder, state: State, message: str) -> None:
    """Writes summary and final status unless they are written; does nothing if the folder cannot be written to."""
    if not folder.is_gone and folder.read_status().state not in OVER:
        with suppress(OSError):
            conclude_unattended(folder, state, message)


def main(run_dir: str) -> None:
    """Ends the run of a supervisor that was killed. A job of a scheduler continues without its supervisor."""
    folder = RunFolder(run_dir)
    with folder.closing(), suppress(Unreadable):  # a damaged status is left as it is
        if _is_scheduled(folder):
            return
        end_processes(folder)
        close(folder, "failed", current_status(folder).message or _NOT_STARTED)


def _is_scheduled(folder: RunFolder) -> bool:
    with suppress(Unreadable):
        return folder.read_launch().is_scheduled
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
