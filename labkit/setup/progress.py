"""Progress on stderr: steps and details, as a live line on a terminal, otherwise as plain lines."""

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
_QUIET = 15.0  # seconds between lines without a terminal
_READING = 5.0  # seconds between lines while a long run is read


class Reading:
    """Prints how much of something was read, as one line on stderr every few seconds. Called with the fraction that was
    read."""

    def __init__(self, name: str):
        self._name, self._printed = name, -math.inf

    def __call__(self, fraction: float) -> None:
        now = time.monotonic()
        if now - self._printed >= _READING:
            self._printed = now
            print(f"labkit: reading {self._name}: {fraction:.0%}", file=sys.stderr, flush=True)


class Progress:
    """A context manager: `step` starts a step, `detail` describes its current activity. A thread displays the elapsed
    seconds."""

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
        """Starts a step and completes the previous one."""
        with self._guard:
            self._finish(done=True)
            self._step, self._detail, self._since = visible_line(text), "", time.monotonic()
            if not self._live:
                self._write(f"labkit: {self._step}\n")

    def detail(self, text: str) -> None:
        """Sets the current activity of the step."""
        self._detail = visible_line(text)

    def lines(self, lines: Iterable[str]) -> None:
        """Prints lines unchanged, except for escapes."""
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
