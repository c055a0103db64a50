"""A plotly Figure that a notebook displays without a second of imports."""

from __future__ import annotations

import os
import sys
from typing import Any

import plotly.graph_objects as go
from plotly.io.base_renderers import PlotlyRenderer

from labkit.figures.controls import CONFIG
from labkit.setup.environment import RENDERER, RENDERER_VARIABLE


class Figure(go.Figure):  # type: ignore[misc]
    """plotly's Figure, which is shown and exported with `CONFIG`. Its display imports nbformat, of which plotly reads
    the version only; in an environment with JupyterLab this compiles dozens of grammars. Where the environment chooses
    the renderer already, nothing has to be imported.
    """

    def _ipython_display_(self) -> None:
        if os.environ.get(RENDERER_VARIABLE) != RENDERER or "plotly.io._renderers" in sys.modules:
            self.show()  # also if the script has chosen another renderer
        else:
            sys.modules["IPython"].display.display(PlotlyRenderer(CONFIG).to_mimebundle(self.to_dict()), raw=True)

    def show(self, *args: Any, **settings: Any) -> None:
        super().show(*args, **_configured(settings))

    def _repr_mimebundle_(self, *args: Any, **settings: Any) -> Any:
        return super()._repr_mimebundle_(*args, **_configured(settings))

    def to_html(self, *args: Any, **settings: Any) -> Any:
        return super().to_html(*args, **_configured(settings))

    def write_html(self, *args: Any, **settings: Any) -> Any:
        return super().write_html(*args, **_configured(settings))


def _configured(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"config": CONFIG | (settings.get("config") or {})}
