"""A plotly Figure that a notebook displays without a second of imports."""

from __future__ import annotations

import os
import sys

import plotly.graph_objects as go
from plotly.io.base_renderers import PlotlyRenderer

from labkit.setup.environment import RENDERER, RENDERER_VARIABLE


class Figure(go.Figure):  # type: ignore[misc]
    """plotly's Figure. Its display imports nbformat, of which plotly reads the version only; in an environment with
    JupyterLab this compiles dozens of grammars. Where the environment chooses the renderer already, nothing has to be
    imported.
    """

    def _ipython_display_(self) -> None:
        if os.environ.get(RENDERER_VARIABLE) != RENDERER or "plotly.io._renderers" in sys.modules:
            super()._ipython_display_()  # also if the script has chosen another renderer
        else:
            sys.modules["IPython"].display.display(PlotlyRenderer().to_mimebundle(self.to_dict()), raw=True)
