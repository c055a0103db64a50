"""Exporting a run: of a recorded one all at once, of one that is under way in a thread that follows it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from labkit.common.text import visible_line
from labkit.exports.figures import Row, Rows
from labkit.exports.files import ExportError
from labkit.exports.tools import TOOLS, Writer, place_of
from labkit.record.documents import Unreadable
from labkit.record.folder import RunFolder

_AT_ONCE = 5_000  # rows that a client gets in one call
_INTERVAL = 1.0  # seconds between two looks at a run that is under way


def export(
    folder: RunFolder, tool: str, out: str | None = None, progress: Callable[[float], None] = lambda share: None
) -> str:
    """Exports what a run has recorded so far, and says where it is and how to open it. `progress` is that of
    `Follower`.

    Raises `ExportError` with one sentence, also for what the tool's client or the disk refuses; `Unreadable` for a
    folder that cannot be read.
    """
    folder.require_readable()
    rows = Rows(folder, progress)
    new = rows.take()
    first = next(new, None)
    if first is None:
        raise ExportError(f"{visible_line(folder.name)} has no steps to export ({visible_line(rows.state.words)})")
    place = place_of(tool, out)
    made = place / folder.name if place is not None and not os.path.lexists(place / folder.name) else None
    writer = None
    try:
        writer = _begun(folder, tool, place, rows)
        _write(writer, chain([first], new))
        writer.end(rows.end())
    except BaseException as error:
        _give_up(writer)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)  # what was written of this export
        if isinstance(error, Exception):  # clients raise anything
            raise _refused(tool, error) from error
        raise
    return writer.where


def _begun(folder: RunFolder, tool: str, place: Path | None, rows: Rows) -> Writer:
    return TOOLS[tool].make(place, folder.name, rows.config(), folder.read_status().started)


def _give_up(writer: Writer | None) -> None:
    if writer is not None:
        with suppress(Exception):
            writer.close()


def _write(writer: Writer, rows: Iterator[Row]) -> None:
    while some := list(islice(rows, _AT_ONCE)):
        writer.write(some)


def _refused(tool: str, error: Exception) -> Exception:
    """An error of a client or of the disk as one sentence."""
    if isinstance(error, (ExportError, Unreadable)):
        return error
    if isinstance(error, OSError) and error.strerror:
        return ExportError(f"{error.filename or TOOLS[tool].title} cannot be written: {error.strerror}")
    said = " ".join(str(error).split())
    return ExportError(f"{TOOLS[tool].title} refused the export: {type(error).__name__}: {visible_line(said)}")


class Live:
    """An export that follows a run in a thread of this process. An error of the tool's client ends the export, never
    the run; `words` say where the export is, or why it `failed`."""

    def __init__(self, folder: RunFolder, tool: str):
        self.tool, self.words, self.failed = tool, f"{tool}: the export has not begun", False
        self._folder = folder
        self._thread = threading.Thread(target=self._follow, daemon=True, name=f"labkit export to {tool}")
        self._thread.start()

    def __repr__(self) -> str:
        return f"<export to {self.words}>"

    def join(self, timeout: float | None = None) -> None:
        """Waits until everything of a run that is over was exported."""
        self._thread.join(timeout)

    def _follow(self) -> None:
        writer, rows = None, Rows(self._folder)
        try:
            writer = _begun(self._folder, self.tool, place_of(self.tool, None), rows)
            self.words = f"{self.tool}: {writer.where}"
            _write(writer, rows.take())
            while not rows.state.over:
                time.sleep(_INTERVAL)
                _write(writer, rows.take())
            writer.end(rows.end())
        except Exception as error:  # the run goes on
            self.failed = True
            self.words = f"{self.tool}: the export failed, which does not affect the run: {_refused(self.tool, error)}"
            _give_up(writer)
