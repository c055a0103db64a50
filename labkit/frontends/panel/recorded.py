"""Recorded runs in the panel: their list, and the widgets that replace the configuration while one is open."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets

from labkit.common.arguments import check_path
from labkit.common.text import escape, visible, visible_line
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import SpecFields
from labkit.record.files import NotPlain
from labkit.record.folder import RunFolder
from labkit.record.follow import Recording, is_recorded, recorded_words
from labkit.record.status import current
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

_NEWEST = 20  # runs in the list
_SPEEDS = (1.0, 2.0, 4.0, 16.0)
_NONE = "choose …"


class Recorded:
    """The list of recorded runs, the replay speed, and the description of the open run.

    `on_choice` is called with the path of the selected run, empty for none.
    """

    def __init__(self, on_choice: Callable[[str], None]):
        self._on_choice = on_choice
        self._recording: Recording | None = None
        self._listing = False
        hint = "Open and replay a recorded run"
        self.which = ipywidgets.Dropdown(options=[(_NONE, "")], description="Recorded", tooltip=hint)
        self.which.observe(self._chosen, "value")
        self.speed = ipywidgets.Dropdown(
            options=[(f"{speed:g}×", speed) for speed in _SPEEDS], value=1.0, description="Speed"
        )
        self.speed.observe(lambda _: self._set_speed(), "value")
        self.close_button = ipywidgets.Button(description="✕ Close", tooltip="Back to the configuration")
        self.close_button.on_click(lambda _: self.choose(""))
        self.close_button.add_class("labkit-close")
        for widget, width in ((self.which, 170), (self.speed, 70)):
            widget.layout.width = f"{width}px"
            widget.add_class("labkit-field")
        self._title, self._said = ipywidgets.HTML(), ipywidgets.HTML()
        self.which.add_class("labkit-recorded-runs")
        row = ipywidgets.HBox([self.which, self.speed, self.close_button])
        row.add_class("labkit-row")
        self.widgets = (self._title, self._said, row)
        self.refresh()

    def refresh(self) -> None:
        """Lists the newest runs that are over, and keeps the selection."""
        there = [folder for folder in RunFolder.all()[: -_NEWEST - 1 : -1] if folder.trouble() or is_recorded(folder)]
        self._list([(_NONE, ""), *((label(folder), str(folder.path)) for folder in there)])

    def choose(self, path: str) -> None:
        """Selects a run by its path and calls `on_choice`; an empty path clears the selection."""
        if path not in [value for _, value in self.which.options]:
            self._list([*self.which.options, (label(RunFolder(path)), path)])
        self.which.value = path

    def _list(self, options: list[tuple[str, str]]) -> None:
        chosen = self.which.value
        if chosen not in [path for _, path in options]:
            options.append((label(RunFolder(chosen)), chosen))
        self._listing = True  # setting the options selects the first one for a moment
        try:
            self.which.options = options
            self.which.value = chosen
        finally:
            self._listing = False

    def _chosen(self, change: dict[str, Any]) -> None:
        if not self._listing:
            self._on_choice(change["new"])

    def open(self, folder: RunFolder) -> Recording:
        """Opens a run's recording at its beginning and shows its description."""
        self._recording = Recording(folder, self.speed.value)
        self._title.value = (
            f'<div class="labkit-recording" role="status"><b>{escape(_what(folder))}</b>'
            f" {escape(recorded_words(folder))}</div>"
        )
        self._said.value = (
            f'<div class="labkit-explanation"><div>Replay of run {escape(folder.name)} with its recorded timing; '
            "nothing is training now.</div>"
            "<div>Play continues from the position where Stop paused the replay; at the end it restarts.</div></div>"
        )
        return self._recording

    def _set_speed(self) -> None:
        if self._recording is not None:
            self._recording.speed = self.speed.value


def find(name: str | os.PathLike[str]) -> RunFolder:
    """Finds a recorded run by `name` as in `RunFolder.find`. Raises `SpecError` if there is none or it is not over."""
    try:
        folder = RunFolder.find(check_path("recorded", name))
        folder.require_readable()
    except (LookupError, TypeError, ValueError) as error:
        raise SpecError("recorded", error.args[0]) from None
    if not is_recorded(folder):
        raise SpecError("recorded", f"{folder.name} is still running; watch it with show({folder.name!r})")
    return folder


def spec_of(folder: RunFolder) -> Spec | None:
    """The Spec of a run; None if a newer version wrote fields that are unknown here."""
    try:
        return folder.read_spec().to_spec()
    except SpecError:
        return None


def _what(folder: RunFolder) -> str:
    """Describes a run: `DDP: CNN on digits, 2 ranks`."""
    asked = folder.read_spec()
    strategy, workload = STRATEGIES.get(asked.strategy), WORKLOADS.get(asked.workload)
    what = strategy.title if strategy else Path(str(asked.script or folder.name)).name
    on = f": {workload.title.partition(':')[0]} on {asked.data or workload.data[0]}" if workload else ""
    return f"{what}{on}, {_ranks(asked)}"


def label(folder: RunFolder) -> str:
    """A line for a list of runs: `03 Mar 14:05 · DDP · 2 ranks · finished`."""
    if why := folder.trouble():
        return visible_line(f"{folder.name} · unreadable: {why}")
    asked, status = folder.read_spec(), current(folder)
    when = time.strftime("%d %b %H:%M", time.localtime(status.started)) if status.started else folder.name
    strategy = STRATEGIES.get(asked.strategy)
    what = strategy.title if strategy else Path(str(asked.script or folder.name)).name
    return visible_line(f"{when} · {what} · {_ranks(asked)} · {'over' if status.state == 'ready' else status.state}")


def _ranks(asked: SpecFields) -> str:
    number = asked.nproc or 1
    return f"{number} rank" + ("" if number == 1 else "s")


def text_of(folder: RunFolder, path: Path) -> str:
    """The text of a file of a run, for display; a comment if it cannot be shown."""
    try:
        return visible(folder.text(path))
    except NotPlain as error:
        return f"# not shown: {error}\n"
    except OSError:
        return f"# {path.name} is missing from the folder of this run\n"
