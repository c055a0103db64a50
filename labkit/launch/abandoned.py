"""Ends a run that has no supervisor any more: its processes, what they leave, and its record.

`python -m labkit.launch.abandoned RUN_DIR` is what the watchdog starts when a supervisor was killed.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from labkit.common.processes import of_folder
from labkit.launch.ending import conclude_unattended
from labkit.launch.remains import end_all
from labkit.record.documents import State, Unreadable
from labkit.record.folder import RunFolder
from labkit.record.state import OVER
from labkit.record.status import current

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
        if _is_batch_job(folder):
            return
        end_processes(folder)
        close(folder, "failed", current(folder).message or _NOT_STARTED)


def _is_batch_job(folder: RunFolder) -> bool:
    with suppress(Unreadable):
        return folder.read_launch().batch_job is not None
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
