"""Selects the thread whose steps are counted: the script's main thread, until another thread trains instead.

Another thread takes over when it runs backward and the current one never has, or has ended. Autograd's own threads
never take over. Of several threads that train at the same time only one is followed; the names of the others are passed
to `on_other`, once each.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable

from labkit.record.stacks import frame_of


class ScriptThread:
    """The followed thread. Create it in the main thread."""

    def __init__(self) -> None:
        self._follow()
        self.trains = False
        self.others: set[str] = set()
        self.on_other: Callable[[str], None] = lambda name: None

    def here(self) -> bool:
        """Whether the calling thread is the followed one. Thread idents are not compared, because they can be
        reused."""
        return hasattr(self._mark, "follows")

    @property
    def may_move(self) -> bool:
        """Whether another training thread would be followed."""
        return not self.trains or not self._thread.is_alive()

    def takes_over(self) -> bool:
        """Call this when a thread other than the followed one trains; returns whether it is followed from now on."""
        thread = threading.current_thread()
        if not self.may_move:
            if thread.name not in self.others:
                self.others.add(thread.name)
                self.on_other(thread.name)
            return False
        self._follow()
        self.trains = True
        return True

    def _follow(self) -> None:
        self._thread, self._mark = threading.current_thread(), threading.local()
        self._mark.follows = True
        known = hasattr(time, "pthread_getcpuclockid")
        ident = threading.get_ident()  # of the calling thread, because an ended thread has no clock
        self._clock = time.pthread_getcpuclockid(ident) if known else None

    def cpu_seconds(self) -> float | None:
        """CPU seconds of the thread; None if unknown."""
        if self._clock is None or not self._thread.is_alive():
            return None
        return time.clock_gettime(self._clock)

    def frame(self) -> types.FrameType | None:
        """The current frame of the thread; if it has ended, that of the main thread."""
        thread = self._thread if self._thread.is_alive() else threading.main_thread()
        return frame_of(thread)


def is_foreign() -> bool:
    """Whether the calling thread was not started by Python, as those of autograd are not."""
    return isinstance(threading.current_thread(), threading._DummyThread)
