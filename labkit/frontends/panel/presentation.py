"""Presentation mode, the keyboard shortcuts of a panel, and the ARIA attributes that the widgets themselves lack."""

from __future__ import annotations

import anywidget
import traitlets

from labkit.frontends.panel.charts import STATIC


class Presentation(anywidget.AnyWidget):
    """A button that switches the enclosing panel to presentation mode; it also handles the panel's keyboard shortcuts.

    Everything runs in the page, so that it responds while the kernel is busy.
    """

    _esm = (STATIC / "presentation.js").read_text(encoding="utf-8")
    on = traitlets.Bool(False).tag(sync=True)
