"""Starts the probe. First of all it binds this process to the launcher, long before torch is imported."""

from __future__ import annotations

import os
import sys

from labkit.probe.lifetime import PARENT, end_with_parent, identity


def give_stdin_to_rank_0() -> None:
    """Empties the standard input of all other ranks: they share one descriptor, and whichever read first would get it."""
    if os.environ.get("RANK", "0") != "0":
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)


def start() -> None:
    """Binds the process to its parent if it is a rank of a run, and runs the script."""
    if os.environ.get("LABKIT_RUN_DIR"):
        end_with_parent(os.environ.pop(PARENT, "") or identity(os.getppid()))  # removed: the script's children have another parent
        give_stdin_to_rank_0()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would tell of itself in the script's output
    from labkit.probe.runner import main

    main(sys.argv[1:])


if __name__ == "__main__":
    start()
