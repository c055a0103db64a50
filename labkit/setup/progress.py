"""Progress on stderr: steps, and what is going on in each, as a live line on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from typing import TextIO

from labkit.common.text import visible_line

_TICK = 0.2  # seconds between redraws of a live line
_QUIET = 15.0  # seconds between lines where there is no terminal
_READING = 5.0  # seconds between lines about a long run that is being read


class Reading:
    """Says on stderr how far the reading of something is, in one line every few seconds. Called with the share that was read."""

    def __init__(self, name: str):
        self._name, self._said = name, -math.inf

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now - self._said >= _READING:
            self._said = now
            print(f"labkit: reading {self._name}: {share:.0%}", file=sys.stderr, flush=True)


class Progress:
    """A context: `step` names what begins, `detail` what it is at. Its own thread shows the seconds, also while nothing is said."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._step = self._detail = ""
        self._since = time.monotonic()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        with self._guard:
            self._finish(done=error[0] is None)

    def step(self, text: str) -> None:
        """Begins a step; the one before it is done."""
        with self._guard:
            self._finish(done=True)
            self._step, self._detail, self._since = visible_line(text), "", time.monotonic()
            if not self._live:
                self._write(f"labkit: {self._step}\n")

    def detail(self, text: str) -> None:
        """What the step is at now."""
        self._detail = visible_line(text)

    def lines(self, lines: Iterable[str]) -> None:
        """Lines to be read as they are."""
        with self._guard:
            self._finish(done=False)
            for line in lines:
                self._write(f"  {visible_line(line)}\n")

    def _tick(self) -> None:
        while not self._over.wait(_TICK if self._live else _QUIET):
            with self._guard:
                if self._step:
                    self._show()

    def _show(self) -> None:
        seconds = f"{time.monotonic() - self._since:.0f} s"
        if not self._live:
            self._write(f"labkit: … {seconds} {self._detail}\n")
            return
        line = f"labkit: {self._step} … {seconds}  {self._detail}"
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")

    def _finish(self, done: bool) -> None:
        if self._step:
            seconds = time.monotonic() - self._since
            took = f" ({seconds:.0f} s)" if done and seconds >= 1 else ""
            if self._live:
                self._write(f"\r\x1b[Klabkit: {self._step}{took}\n")
            elif took:
                self._write(f"labkit: done{took}\n")
        self._step = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
