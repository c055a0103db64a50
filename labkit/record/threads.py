"""Waits until the other threads of a process are at rest."""

from __future__ import annotations

import threading
import time
from pathlib import Path

_UNREST = 0.5  # maximum seconds to wait
_LOOKS = 5  # consecutive checks, 1 ms apart, in which all threads sleep: a thread that was just woken shows up late
_MOMENT = 0.02  # seconds to wait if the state of threads is unknown


def wait_for_other_threads() -> None:
    """Waits up to `_UNREST` seconds until no other thread of this process runs.

    A gloo thread first wakes the thread that waits for its operation, and then notes its end and releases its tensors,
    on a busy machine much later. If the system does not report the state of threads, it sleeps for `_MOMENT` seconds.
    """
    tasks, own, last = Path("/proc/self/task"), str(threading.get_native_id()), time.monotonic() + _UNREST
    if not tasks.is_dir():
        time.sleep(_MOMENT)
        return
    at_rest = 0
    while at_rest < _LOOKS and time.monotonic() < last:
        at_rest = at_rest + 1 if not any(_runs(task) for task in tasks.iterdir() if task.name != own) else 0
        time.sleep(0.001)


def _runs(task: Path) -> bool:
    """Whether a thread is running or runnable."""
    try:
        return (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].startswith("R")
    except OSError:
        return False  # it has just ended
