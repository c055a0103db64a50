"""The time line of recorded runs: it plays them, stops at any moment, and goes to a step, a finding or the peak of
memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import numpy

from labkit.analysis.moments import Course, course
from labkit.frontends.panel.charts import HandshakeWidget, program
from labkit.record.folder import RunFolder
from labkit.record.follow import Recording

_REDRAW = 0.25  # seconds between two pictures while it plays


class _ReplayWidget(HandshakeWidget):
    """The browser side: sends "ready", "seek", "step", "play" and "speed"."""

    _esm = program("replay.js")


class Replay:
    """The time line of one recorded run, or of several in step: whenever the first one has finished a step, so have the
    others.

    Display `widget`, which is hidden until a run is opened. `show` is called with the recordings and whether they play,
    in a thread that holds `lock`.
    """

    def __init__(self, show: Callable[[Sequence[Recording], bool], None], lock: AbstractContextManager[Any]) -> None:
        self.page = _ReplayWidget()
        self.page.on_msg(self._heard)
        self.widget = self.page.box
        self._show, self._lock = show, lock
        self._recordings: tuple[Recording, ...] = ()
        self._courses: tuple[Course, ...] = ()
        self._position, self._speed = 0.0, 1.0
        self._playing = False
        self._changed = threading.Event()  # wakes the thread that moves what is open
        self._answers: dict[str, Callable[[dict[str, Any]], None]] = {
            "seek": lambda message: self.seek(float(message["position"])),
            "step": lambda message: self.to_step(int(message["step"])),
            "play": lambda message: self.play(bool(message["playing"])),
            "speed": lambda message: self.set_speed(float(message["speed"])),
        }

    @property
    def playing(self) -> bool:
        """Whether time passes in the recordings."""
        return self._playing

    def open(self, *folders: RunFolder, at_end: bool = False, wanted: Callable[[], bool] = lambda: True) -> None:
        """Offers runs that are over, and shows their beginning, or, if `at_end`, nothing: their end is shown already.

        All of their events are read first; if they are not `wanted` any longer then, nothing changes.
        """
        courses = tuple(course(folder) for folder in folders)
        recordings = tuple(Recording(folder) for folder in folders)
        with self._lock:
            if not wanted():
                return
            self.close()
            self._recordings, self._courses = recordings, courses
            self._position = courses[0].seconds if at_end else 0.0
            self._changed = threading.Event()
            if not at_end:
                self._draw()
            self._send_all()
            work = (recordings, self._changed)
        threading.Thread(target=self._work, args=work, daemon=True, name="labkit replay").start()

    def close(self) -> None:
        """Offers no run any longer."""
        with self._lock:
            self._recordings, self._courses, self._playing = (), (), False
            self._changed.set()
            self._send_all()

    def play(self, playing: bool = True) -> None:
        """Plays from where the replay is, from the beginning if it is at the end; or pauses."""
        courses = self._courses
        if not courses:
            return
        if playing and self._position >= courses[0].seconds:
            self._position = 0.0
        self._playing = playing
        self._changed.set()

    def seek(self, position: float) -> None:
        """Goes to a moment, in seconds since the first run began."""
        courses = self._courses
        if courses:
            self._position = min(max(0.0, position), courses[0].seconds)
            self._changed.set()

    def to_step(self, step: int) -> None:
        """Goes to the moment at which all ranks had finished a step."""
        courses = self._courses
        if courses:
            self.seek(courses[0].end_of(step))

    def set_speed(self, speed: float) -> None:
        """How many seconds of the first run pass in a second."""
        self._speed = speed

    # ---- the thread that moves

    def _work(self, recordings: tuple[Recording, ...], changed: threading.Event) -> None:
        """Shows what is wanted, and goes on while the replay plays."""
        before = time.monotonic()
        while True:
            woken = changed.wait(_REDRAW if self._playing else None)
            changed.clear()
            with self._lock:
                if self._recordings is not recordings:
                    return
                before, passed = time.monotonic(), time.monotonic() - before
                if self._playing and not woken:
                    self._position += passed * self._speed
                if self._position >= self._courses[0].seconds:
                    self._position, self._playing = self._courses[0].seconds, False
                self._draw()

    def _draw(self) -> None:
        for recording, position in zip(self._recordings, self._positions()):
            recording.seek(position)
        self._show(self._recordings, self._playing)
        self._say()

    def _positions(self) -> list[float]:
        """Where each run is: the first one at the position, and the others after as many steps."""
        first, *others = self._courses
        positions = [self._position]
        for other in others:
            shared = min(len(first.steps), len(other.steps))
            moments = [0.0, *first.steps[:shared], first.seconds]
            theirs = [0.0, *other.steps[:shared], other.seconds]
            positions.append(float(numpy.interp(self._position, moments, theirs)))
        return positions

    # ---- the page

    def _heard(self, _, message, buffers) -> None:
        kind = message.get("kind")
        if kind == "ready":  # in a thread: the lock may be held while a long run is drawn, and the kernel must not wait
            threading.Thread(target=self._send_all, daemon=True).start()
        elif kind in self._answers:
            self._answers[kind](message)

    def _send_all(self) -> None:
        with self._lock:
            if not self._courses:
                self.page.send({"kind": "course", "course": None})
                return
            first = self._courses[0]
            moments = [asdict(moment) for moment in first.moments]
            self.page.send(
                {"kind": "course", "course": {"seconds": first.seconds, "steps": len(first.steps), "moments": moments}}
            )
            self._say()

    def _say(self) -> None:
        step = self._courses[0].step_at(self._position)
        self.page.send({"kind": "at", "position": self._position, "step": step, "playing": self._playing})
