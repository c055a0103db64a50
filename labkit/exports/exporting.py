"""The table of tools that a run can be exported to, and an export: of a recorded run all at once, of one that is under
way in a thread that follows it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from labkit.analysis.profiled import profiled_steps
from labkit.common.arguments import check_choice, shown
from labkit.common.text import visible_line
from labkit.exports.figures import End, Row, Rows
from labkit.exports.files import Csv, ExportError, Parquet, Perfetto
from labkit.exports.trackers import Mlflow, TensorBoard, Trackio, Wandb
from labkit.record.documents import Unreadable
from labkit.record.folder import RunFolder
from labkit.setup.environment import has, how_to_add

_AT_ONCE = 5_000  # rows that a client gets in one call
_INTERVAL = 1.0  # seconds between two looks at a run that is under way

# ---- the tools


class Writer(Protocol):
    """An export that is being written: `where` says where it is and how to open it. `end` closes it; `close` does so
    after an error."""

    where: str

    def write(self, rows: Sequence[Row]) -> None: ...

    def end(self, end: End) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tool:
    """A tool: its `title`; `make` starts an export, with the folder for it, the name of the run, its configuration and
    its start in Unix seconds; the `extra` of its client; and `keeps`, if without --out it writes where it keeps its
    runs itself."""

    title: str
    make: Callable[[Any, str, dict[str, Any], float | None], Writer]
    extra: str | None = None
    keeps: bool = False


TOOLS = {
    "tensorboard": Tool("TensorBoard", TensorBoard, "tensorboard"),
    "trackio": Tool("trackio", Trackio, "trackio", keeps=True),
    "wandb": Tool("Weights & Biases", Wandb, "wandb", keeps=True),
    "mlflow": Tool("MLflow", Mlflow, "mlflow", keeps=True),
    "perfetto": Tool("Perfetto", Perfetto),
    "csv": Tool("CSV", Csv),
    "parquet": Tool("Parquet", Parquet, "parquet"),
}


def check_tools(name: str, asked: str | Iterable[str]) -> tuple[str, ...]:
    """Names of tools, without duplicates: from one name, or several as a list or with commas. Raises `ValueError` or
    `TypeError` for an unknown one, `ExportError` if the package of one is not installed."""
    if isinstance(asked, str):
        names = [part.strip() for part in asked.split(",")]
    elif isinstance(asked, (list, tuple)):
        names = list(asked)
    else:
        raise TypeError(f"{name} must be one of {', '.join(TOOLS)}, or a list of them, got {shown(asked)}")
    for tool in names:
        check_choice(name, tool, TOOLS)
        extra = TOOLS[tool].extra
        if extra is not None and not has(extra):
            raise ExportError(
                f"an export to {TOOLS[tool].title} needs a package that is not installed; {how_to_add(extra)}"
            )
    return tuple(dict.fromkeys(names))


def place_of(tool: str, out: str | None) -> Path | None:
    """The folder for an export: `out`, or `exports/TOOL`; None if the tool keeps its runs itself."""
    if out is not None:
        return Path(out)
    return None if TOOLS[tool].keeps else Path("exports", tool)


# ---- an export


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
    first = [*islice(new, 1)]
    if not first and not profiled_steps(rows.state):
        raise ExportError(f"{visible_line(folder.name)} has no steps to export ({visible_line(rows.state.words)})")
    place = place_of(tool, out)
    made = place / folder.name if place is not None and not os.path.lexists(place / folder.name) else None
    writer = None
    try:
        writer = _begun(folder, tool, place, rows)
        _write(writer, chain(first, new))
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
