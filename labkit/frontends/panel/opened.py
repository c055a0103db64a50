"""The tab Open…: files of a job that ran anywhere, explained in the panel."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.analysis.foreign.page import Page
from labkit.common.text import escape
from labkit.figures.tables import Explained
from labkit.frontends.panel import widgets
from labkit.frontends.panel.words import sentence_html, state_html
from labkit.record.folder import RunFolder

_HINT = (
    "Name the logs, profiles of torch.profiler or dumps of the flight recorder of a job that ran anywhere, or their "
    "folder. Files of another computer: drop them into the list of files at the left first."
)
_MOST = 500  # names that are offered


class OpenTab:
    """A field for paths, separated by spaces as in a shell, and what the files say. Files are read in a thread. If they
    are to be kept as a run, `on_kept` is called with its path."""

    def __init__(self, on_kept: Callable[[str], None]) -> None:
        self._on_kept = on_kept
        self.paths = widgets.Combobox(
            description="Files", placeholder="logs/  slurm-1234.out  trace_*.json.gz", continuous_update=False
        )
        self.paths.add_class("labkit-paths")
        self.button = widgets.Button(description="Open", tooltip="Read the files and say what happened")
        hint = "Make a run of them, which has a time line and can be compared and exported"
        self.kept = widgets.Checkbox(value=False, description="Keep as a run", indent=False, tooltip=hint)
        self.kept.add_class("labkit-kept")
        self._said = widgets.HTML()
        self.page = widgets.HTML(f'<p class="labkit-empty">{escape(_HINT)}</p>')
        self.page.add_class("labkit-comparison")
        self.page.add_class("labkit-explained")
        self.page.tabbable = True  # it is scrolled with the keyboard, too
        bar = widgets.HBox([self.paths, self.button, self.kept, self._said])
        bar.add_class("labkit-bar")
        self.widget = widgets.VBox([bar, self.page])
        self.widget.add_class("labkit-opened")
        self.button.on_click(lambda _: self.open())
        self.paths.observe(lambda _: self.open(), "value")  # when Enter is pressed, or a name is chosen
        self._thread: threading.Thread | None = None
        self._kept: tuple[Any, RunFolder] | None = None  # the files that were kept last, with their times, and the run

    def opened(self) -> None:
        """The tab is shown: offers the names of the folder of the notebook."""
        try:
            names = sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir() if entry.name[0] not in "._")
        except OSError:
            names = []
        self.paths.options = tuple(names[:_MOST])

    def open(self) -> None:
        """Reads the files that are named, unless it does so already."""
        if not self.paths.value.strip() or (self._thread is not None and self._thread.is_alive()):
            return
        self.button.disabled = True
        self._said.value = state_html("reading the files", "busy")
        self._thread = threading.Thread(target=self._read, args=(self.paths.value,), daemon=True, name="labkit open")
        self._thread.start()

    def _read(self, text: str) -> None:
        from labkit.analysis.foreign.opening import explain

        try:
            paths = _paths(text)
            pages = explain(paths)
            self.page.value = Explained(pages)._repr_html_()
            folder = self._keep(pages, paths[0]) if self.kept.value else None
        except ValueError as error:
            self._said.value = sentence_html(str(error))
        except OSError as error:
            self._said.value = sentence_html(f"{error.filename} cannot be written: {error.strerror}")
        except Exception as error:
            self._said.value = sentence_html(f"these files cannot be explained: {type(error).__name__}: {error}")
        else:
            self._said.value = state_html(f"kept as the run {folder.name}", "good") if folder else ""
            if folder:
                self._on_kept(str(folder.path))
        finally:
            self.button.disabled = False

    def _keep(self, pages: Sequence[Page], path: Path) -> RunFolder:
        """The run of these files. A click on Open also leaves the field with the paths, which opens them already: the
        same files become one run."""
        from labkit.runs.importing import keep, name_for

        files = [(file, file.stat().st_mtime_ns) for page in pages for file in page.files]
        if self._kept is None or self._kept[0] != files or not self._kept[1].path.is_dir():
            self._kept = files, keep(pages, name_for(path))
        return self._kept[1]


def _paths(text: str) -> list[Path]:
    """The paths in a line, with patterns such as `trace_*`. Raises `ValueError` for an open quotation mark."""
    paths: list[Path] = []
    for name in shlex.split(text):
        path = Path(name).expanduser()
        pattern = any(sign in name for sign in "*?[")
        found = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))) if pattern else []
        paths += sorted(found) or [path]
    return paths
