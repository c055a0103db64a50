"""Presentation mode, the keyboard shortcuts of a panel, and the ARIA attributes that the widgets themselves lack."""

from __future__ import annotations

import traitlets

from labkit.frontends.panel.charts import HandshakeWidget, program


class Presentation(HandshakeWidget):
    """A button that switches the enclosing panel to presentation mode; it also handles the panel's keyboard shortcuts.

    Everything runs in the page, so that it responds while the kernel is busy.
    """

    _esm = program("presentation.js")
    on = traitlets.Bool(False).tag(sync=True)
