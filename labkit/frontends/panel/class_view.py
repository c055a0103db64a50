"""A class in JupyterLab: the page of `labkit class`, read again every few seconds while it is on screen."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.common.arguments import Number
from labkit.common.text import escape
from labkit.common.units import counted
from labkit.course.classroom import page
from labkit.course.classroom.overview import Class, Overview
from labkit.figures.tables import table_text
from labkit.frontends.panel import widgets
from labkit.frontends.panel.view import style
from labkit.frontends.panel.widgets import Presentation, sentence_html
from labkit.runs.notebook import headless

EVERY = Number(float, 1.0, 3600.0)  # seconds between two readings
_MOST = 8  # exercises and guesses that fit on one screen
_shown: list[ClassPanel] = []  # the panel that reads: one in a kernel


def classroom(
    folder: Any, *, grades: Any = None, minutes: float = 10.0, hide_names: bool = False, every: float = 10.0
) -> ClassPanel:
    """The class in a folder with a subfolder or zip for each learner: progress, grades, guesses, and the runs that have
    failed in the last `minutes`. In a notebook it is read again `every` so many seconds; nothing leaves this machine.

    `grades` is the CSV of `labkit grade` (default: the one that lies next to the folder). `hide_names` puts numbers in
    place of names. Raises `ValueError` for a folder that is none, and for other invalid values.
    """
    return ClassPanel(Class(folder, grades=grades, minutes=minutes, hide_names=hide_names), EVERY.check("every", every))


class ClassPanel:
    """What `classroom` returns: it displays itself live in a notebook, and as text elsewhere."""

    def __init__(self, found: Class, every: float):
        self._class, self._every = found, every
        self._lock = threading.Lock()  # of the class, which a thread and a switch read
        self._over = threading.Event()  # of the thread that reads for what is on screen

    def overview(self) -> Overview:
        """The class now, as plain values."""
        with self._lock:
            return self._class.read()

    def __repr__(self) -> str:
        found = self.overview()
        rows = [page.cells(row, found) for row in found.rows]
        return f"{page.title(found)}\n{table_text(page.HEADS, rows, page.WORDS)}"

    def close(self) -> None:
        """Stops reading; what is on screen stays."""
        self._over.set()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if headless():
            found = self.overview()
            display({"text/html": page.style() + page.fragment(found), "text/plain": repr(self)}, raw=True)
            return
        for panel in _shown:
            panel.close()
        _shown[:] = [self]
        display(self._widget())
        self._over = threading.Event()
        widgets.in_thread("class", self._follow, self._over)

    def _widget(self) -> Any:
        self.title, self.body, self._said = widgets.HTML(), widgets.HTML(), widgets.HTML()
        hint = "Numbers in place of names, for the projector"
        self.hide = widgets.toggle("Hide names", hint, self._hide, value=self._class.hide_names, css="labkit-hide")
        hint = "Zips that learners have sent you, into the folder of the class: NAME.zip is the learner NAME"
        self.upload = widgets.FileUpload(
            description="Add zips", accept=".zip", multiple=True, tooltip=hint, css="labkit-upload"
        )
        self.upload.observe(lambda change: self._take_in(change["new"]), "value")
        self._added = widgets.HTML()
        actions = widgets.HBox(
            [self.title, self.upload, self.hide, self._said, Presentation().box], css="labkit-actions"
        )
        return widgets.VBox(
            [style(), widgets.HTML(page.style(), layout=widgets.HIDDEN), actions, self._added, self.body],
            css="labkit",
        )

    def _take_in(self, files: Sequence[Mapping[str, Any]]) -> None:
        if not files:  # emptied below
            return
        with self._lock:
            added, refused = self._class.take_in((file["name"], bytes(file["content"])) for file in files)
        self._added.value = f"{counted(added, 'zip')} added" + "".join(map(sentence_html, refused))
        self.upload.value = ()  # a notebook is saved with the values of its widgets
        self._draw()

    def _hide(self, hidden: bool) -> None:
        with self._lock:
            self._class.hide_names = hidden
        self._added.value = ""  # it may have names
        self._draw()

    def _follow(self, over: threading.Event) -> None:
        """Reads until another panel is shown; with short pauses while there is more to read."""
        while not over.is_set():
            began = time.monotonic()
            self._draw()
            took = time.monotonic() - began
            over.wait(max(self._every, 5 * took) if self._class.complete else took)

    def _draw(self) -> None:
        try:
            with self._lock:
                found = self._class.refresh()
                # under the lock: what was read before a switch must not replace what was read after it
                self.title.value = f"<b>{escape(page.title(found))}</b> {escape(page.about(found))}"
                self.body.value = page.fragment(found, _MOST)
                self._said.value = ""
        except ValueError as error:
            self._said.value = sentence_html(str(error))
        except Exception as error:  # show it: an exception in a thread would go unnoticed
            self._said.value = sentence_html(f"the class cannot be read: {type(error).__name__}: {error}")
