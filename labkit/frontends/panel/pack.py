"""The button that packs what is shown as a zip, for a machine without this lab."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import ipywidgets

from labkit.common.text import escape
from labkit.common.units import size
from labkit.engines import archive
from labkit.engines.job_files import profile
from labkit.engines.portable import of_run, of_spec
from labkit.frontends.panel.words import sentence_html
from labkit.plan.spec import Spec
from labkit.record.follow import Recording

_HINT = "Write script, torchrun commands, batch files and requirements to a zip that runs without labkit"


class Pack:
    """Packs what `chosen` returns: a recorded run, the Spec that would run, or nothing."""

    def __init__(self, chosen: Callable[[], Recording | Spec | None]):
        self._chosen = chosen
        self.button = ipywidgets.Button(description="Pack as zip", tooltip=_HINT)
        self.button.on_click(lambda _: self._start())
        self.said = ipywidgets.HTML()
        self.widget = ipywidgets.HBox([self.button, self.said])
        self.button.add_class("labkit-pack")
        self.said.add_class("labkit-packed")

    def _start(self) -> None:
        chosen = self._chosen()
        if chosen is None:
            self.said.value = sentence_html("this configuration cannot run; the reason stands above")
            return
        self.button.disabled = True
        threading.Thread(target=self._pack, args=(chosen,), daemon=True, name="labkit pack").start()

    def _pack(self, chosen: Recording | Spec) -> None:
        """Runs in a thread, because the versions of all packages are looked up."""
        try:
            job = of_spec(chosen) if isinstance(chosen, Spec) else of_run(chosen.folder)
            path = archive.pack(job, profile(), Path.cwd() / f"{job.name}.zip")
            self.said.value = f"<span>{escape(str(path))} ({size(path.stat().st_size)})</span>"
        except Exception as error:  # show it: an exception in a thread would go unnoticed
            self.said.value = sentence_html(str(error))
        finally:
            self.button.disabled = False
