"""The supervisor: a small process in a session of its own that starts torchrun, watches it, and sees that nothing is left of it.

`python -m labkit.launch.supervisor RUN_DIR STARTED`. Its standard input is the lifeline: a pipe whose other end the starter holds
open for as long as it lives. Torchrun is started before anything heavy is imported, for it has the longer way to go.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from labkit.launch.folder import RunFolder

_PR_SET_PDEATHSIG = 1


def main(run_dir: str, started: str) -> None:
    """Runs what the run folder's plan says to its end. `started` is the unix time at which the run was asked for."""
    signals = _wake_on_signals()
    folder = RunFolder(run_dir)
    plan = RunFolder.read_json(folder.plan)
    agent = _start(plan, folder)

    from labkit.launch.watch import Watch  # now, while torchrun imports torch

    Watch(folder, plan, agent, float(started), signals).run()
    sys.stderr.flush()
    os._exit(0)  # the last word is written: no thread, no NVML and no interpreter's farewell may hold it up


def _wake_on_signals() -> int:
    """A pipe's end on which the number of each signal arrives as one byte, so that none interrupts anything half-way."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)  # a handler, not SIG_IGN: torchrun must not inherit deafness
    return read


def _start(plan: dict[str, Any], folder: RunFolder) -> subprocess.Popen:
    with open(folder.launcher_log, "ab") as log:
        return subprocess.Popen(
            plan["argv"], cwd=plan["cwd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_this_process()
        )


def _end_with_this_process() -> Callable[[], None] | None:
    """What torchrun does before it begins: asks Linux for SIGKILL when its parent, this process, dies. Elsewhere nothing."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before it was asked
            os._exit(1)

    return ask


if __name__ == "__main__":
    main(*sys.argv[1:])
