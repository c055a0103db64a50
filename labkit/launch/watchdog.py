"""Watchdog: a shell that waits until a supervisor ends, and has its run ended if the supervisor was killed.

The shell blocks on a pipe, whose other end the supervisor holds, and until the run has a status its starter, too. The
end of a process closes its descriptors, however it ends, and only a line in the pipe says that the run was brought to
its end. A shell costs a millisecond at the start of a run; Python (`launch/ending.py`) starts only if it is needed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from labkit.common.processes import TAG, watchdog_tag
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
