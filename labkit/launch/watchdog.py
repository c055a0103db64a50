"""Watchdog: a shell that waits until a supervisor ends, and has its run ended if the supervisor was killed.

The shell blocks on a pipe, whose other end the supervisor holds, and until the run has a status its starter, too. The
end of a process closes its descriptors, however it ends, and only a line in the pipe says that the run was brought to
its end. A shell costs a millisecond at the start of a run; Python (`launch/ending.py`) starts only if it is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.common.files import create, runtime_folder
from labkit.common.processes import TAG, end, living, watchdog_tag
from labkit.record.folder import RunFolder

_SCRIPT = 'read -r released || exec "$@"'
_LEAVES = 1000  # milliseconds to wait until the shell has ended


def start(folder: RunFolder, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """The watchdog of a run, and its pipe, which the caller must pass to the supervisor and close. `environment` is
    that of the supervisor."""
    waits, pipe = os.pipe()
    command = [sys.executable, "-m", "labkit.launch.ending", str(folder.path)]
    try:
        with open(folder.supervisor_log, "ab") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "labkit", *command],
                cwd="/",  # no file of a user can shadow a module there
                env={**environment, TAG: watchdog_tag(folder.path)},
                stdin=waits,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except BaseException:
        os.close(pipe)
        raise
    finally:
        os.close(waits)
    return process, pipe


def release(pipe: int) -> None:
    """Lets the watchdog end, because the run has ended, and returns when it has."""
    with suppress(BrokenPipeError):  # it was killed
        os.write(pipe, b"\n")
    gone = select.poll()
    gone.register(pipe, 0)  # an error occurs as soon as nobody can read
    gone.poll(_LEAVES)


# ---- what killed processes leave outside of the run folder
#
# - Python's multiprocessing puts sockets into a folder for temporary files. All ranks of a run share one, named after
#   the run folder (`probe/__main__.py`).
# - torch names a segment of shared memory after the process that creates it, and unlinks it a moment later. A process
#   that is killed in this moment leaves the segment.


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
    run: Path, find: Callable[[], list[psutil.Process]], grace: float, known: Iterable[int]
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
