"""Journal: one rank's events, and the promise that watching never breaks a script."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.events import Writer


class Journal:
    """Appends a rank's events to `<run>/events/rank<r>.jsonl`. It never raises, and is silent in a forked child."""

    def __init__(self, run: str | os.PathLike[str], rank: int):
        folder = Path(run) / "events"
        folder.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        self._writer: Writer | None = Writer(folder / f"rank{rank}.jsonl", rank)
        os.register_at_fork(after_in_child=self._silence)

    def _silence(self) -> None:
        self._writer = None

    @property
    def silent(self) -> bool:
        """Whether nothing is written any more: in a child of the rank, or after the disk refused."""
        return self._writer is None

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event; where that fails (a full disk) the script goes on and nothing more is written."""
        if self._writer is None:
            return
        try:
            self._writer.write(kind, **fields)
        except OSError:
            self._writer = None


class Guard:
    """Calls one part of the probe; after its first exception, told as a `probe_error`, that part is off for good."""

    def __init__(self, journal: Journal, part: str):
        self.off = False
        self._journal = journal
        self._part = part

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.off or self._journal.silent:
            return None
        try:
            return function(*args)
        except Exception as error:
            self.off = True
            self._journal.write(
                "probe_error", part=self._part, type=type(error).__name__, message=str(error), traceback=traceback.format_exc()
            )
            return None
