"""Starts the probe. The first thing is the promise to die with the launcher, long before torch has been imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies, so that SIGKILL to torchrun's agent leaves no orphan (Linux only)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the promise was made
        os.kill(os.getpid(), signal.SIGKILL)


def start() -> None:
    """Makes the promise where this is a rank of a run, and runs the script."""
    if os.environ.get("LABKIT_RUN_DIR"):
        die_with_parent()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would tell of itself in the script's output
    from labkit.probe.runner import main

    main(sys.argv[1:])


if __name__ == "__main__":
    start()
