"""What the processes of a run leave outside of its folder when they are killed, and its removal.

- Python's multiprocessing puts sockets into a folder for temporary files. All ranks of a run share one, named after the
  run folder (`probe/__main__.py`).
- torch names a segment of shared memory after the process that creates it, and unlinks it a moment later. A process
  that is killed in this moment leaves the segment.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.common.files import create, runtime_folder
from labkit.common.processes import end, living

TEMPORARY = "LABKIT_TEMPORARY"
_SHARED = Path("/dev/shm")
_SEGMENT = re.compile(r"torch_(\d+)_\d+_\d+", re.ASCII)


def temporary(run: Path) -> Path:
    """The folder for the sockets of a run, which is named after the run folder, so that nothing needs to store it."""
    return runtime_folder() / hashlib.sha256(os.fsencode(run)).hexdigest()[:16]


def create_temporary(run: Path) -> None:
    """Creates the folder for the sockets of a run, and names it in the environment of the processes that this one
    starts. If it cannot be created, multiprocessing makes its own."""
    os.environ.pop(TEMPORARY, None)  # of a run that contains this one
    folder = temporary(run)
    with suppress(OSError):
        create(folder.parent)
        create(folder)
        os.environ[TEMPORARY] = str(folder)


def end_all(
    run: Path, find: Callable[[], list[psutil.Process]], grace: float, known: Iterable[int] = ()
) -> list[psutil.Process]:
    """Terminates the processes of a run as `end` does, and removes what they leave outside of the run folder. `known`
    are the pids of processes of the run that may have ended already; they may come from a file, so the shared memory of
    a process that lives is never removed."""
    pids = set(known)

    def found() -> list[psutil.Process]:
        processes = find()
        pids.update(process.pid for process in processes)
        return processes

    left = end(found, grace)
    shutil.rmtree(temporary(run), ignore_errors=True)
    _remove_segments(pids)
    return left


def _remove_segments(pids: set[int]) -> None:
    """Removes the shared memory that those of these processes created that have ended."""
    for path in _SHARED.glob("torch_*"):
        name = _SEGMENT.fullmatch(path.name)
        if name and int(name[1]) in pids and living(int(name[1])) is None:
            with suppress(OSError):
                path.unlink()
