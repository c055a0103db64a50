"""The view for a projector, the keys of a panel, and what a screen reader is told beyond what the widgets say by themselves."""

from __future__ import annotations

import anywidget
import traitlets

from labkit.frontends.panel.charts import STATIC


class Stage(anywidget.AnyWidget):
    """A button that turns the panel around it into a view for a projector; it also listens to the panel's keys.

    All of it happens in the page, so that it answers at once while the kernel is busy.
    """

    _esm = (STATIC / "stage.js").read_text(encoding="utf-8")
    on = traitlets.Bool(False).tag(sync=True)
