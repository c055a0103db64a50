"""The button that installs a missing optional package with `labkit setup --with EXTRA`, the same command as in a
terminal.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import ipywidgets

from labkit.frontends.panel.words import sentence_html, state_html
from labkit.setup import environment

_REDRAW = 0.5  # seconds between two updates of the progress line


def setup_command(extra: str) -> list[str]:
    """The command that installs an optional extra into this kernel's environment; installed packages keep their
    versions.
    """
    return [sys.executable, "-m", "labkit", "setup", "--with", extra]


class Install:
    """A button and a progress line, visible only while an extra is missing or being installed.

    `on_done` is called in a separate thread when this kernel can import the extra.
    """

    def __init__(self, on_done: Callable[[], None]):
        self._on_done = on_done
        self._extra: str | None = None
        self._thread: threading.Thread | None = None
        self._said = ""
        self.button = ipywidgets.Button(description="Install", layout={"display": "none"})
        self.button.add_class("labkit-install")
        self.button.on_click(lambda _: self.start())
        self.progress = ipywidgets.HTML()
        self.widget = ipywidgets.HBox([self.button, self.progress])

    @property
    def busy(self) -> bool:
        """Whether an installation is running."""
        return self._thread is not None and self._thread.is_alive()

    def offer(self, extra: str | None) -> None:
        """Shows the button for an extra, or hides it for None; the progress of a running installation stays visible."""
        if self.busy:
            return
        if extra != self._extra:
            self.progress.value = ""
        self._extra = extra
        self.button.layout.display = "none" if extra is None else ""
        if extra is not None:
            self.button.description = f"Install {environment.OPTIONAL[extra]}"
            self.button.tooltip = " ".join(["python3", *setup_command(extra)[1:]])

    def start(self) -> None:
        """Starts the installation and returns immediately."""
        if self._extra is None or self.busy:
            return
        self.button.disabled = True
        self._said = "starting"
        self._thread = threading.Thread(target=self._work, args=(self._extra,), daemon=True, name="labkit install")
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for a running installation."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self, extra: str) -> None:
        try:
            code = self._run(extra)
        except OSError as error:
            code, self._said = 1, str(error)
        importlib.invalidate_caches()  # folders were listed before the package existed
        self.button.disabled = False
        if environment.has(extra):
            self.progress.value = ""
            self._thread = None
            self._on_done()
        elif code == 0:
            self.progress.value = sentence_html(
                f"installed, but not for this kernel ({sys.executable}); restart the lab: python3 -m labkit lab"
            )
        else:
            self.progress.value = sentence_html(self._said)

    def _run(self, extra: str) -> int:
        began, shown = time.monotonic(), threading.Event()
        ticking = threading.Thread(target=self._tick, args=(began, shown), daemon=True)
        with subprocess.Popen(
            setup_command(extra),
            cwd=environment.CLONE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            ticking.start()
            for line in process.stdout:
                self._said = line.strip().removeprefix("labkit: ") or self._said
                self._show(began)
        shown.set()
        ticking.join()
        return process.returncode

    def _tick(self, began: float, over: threading.Event) -> None:
        """Updates the elapsed time while nothing is printed."""
        while not over.wait(_REDRAW):
            self._show(began)

    def _show(self, began: float) -> None:
        self.progress.value = state_html(f"{self._said} ({time.monotonic() - began:.0f} s)", "busy")
