"""Starts the probe: binds this process to the launcher before torch is imported, then runs the script."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from labkit.probe.lifetime import PARENT, end_with_parent, identity


def give_stdin_to_rank_0() -> None:
    """Empties the standard input of all other ranks, because they share one descriptor and the first reader would
    consume it.
    """
    if os.environ.get("RANK", "0") != "0":
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)


def write_to_own_logs(folder: str) -> None:
    """Redirects the output of this rank to its own files, in torchrun's layout; torchrun itself knows only the number
    of a rank on its node. It does not count a restart because of another node, so LABKIT_ATTEMPT has the attempt."""
    for attempt in count():
        place = Path(folder, "ranks", f"attempt_{attempt}", os.environ["RANK"])
        if not place.exists():
            break
    os.environ["LABKIT_ATTEMPT"] = str(attempt)
    place.mkdir(mode=0o700, parents=True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(place / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)


def use_temporary_folder(folder: str) -> None:
    """Makes multiprocessing put the sockets of this rank and of its children into a folder that is removed with the
    run, also if they are killed."""
    import multiprocessing.process

    if Path(folder).is_dir():
        multiprocessing.process.current_process()._config["tempdir"] = folder  # as multiprocessing.util.get_temp_dir


def give_way(niceness: int) -> None:
    """Lets all other processes of this machine go first, by `niceness` (0 to 19).

    torchrun starts each rank in a session of its own. Linux shares the cores between sessions before it looks at the
    niceness of their processes, and a session has a niceness of its own (`sched(7)`, the autogroup feature).
    """
    if hasattr(os, "nice"):  # not on Windows
        os.nice(niceness)
    with suppress(OSError):  # a kernel without this feature, or another system
        Path("/proc/self/autogroup").write_text(str(niceness))


def start() -> None:
    """Binds the process to its parent if it is a rank of a run, and runs the script."""
    if os.environ.get("LABKIT_RUN_DIR"):
        # removed, because the script's children have another parent
        end_with_parent(os.environ.pop(PARENT, "") or identity(os.getppid()))
        give_stdin_to_rank_0()
        if folder := os.environ.get("LABKIT_LOGS"):
            write_to_own_logs(folder)
        if folder := os.environ.get("LABKIT_TEMPORARY"):
            use_temporary_folder(folder)
        if niceness := os.environ.pop("LABKIT_NICENESS", ""):
            give_way(int(niceness))
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps messages of torch's profiler out of the script's output
    from labkit.probe.runner import main

    main(sys.argv[1:])


if __name__ == "__main__":
    start()
