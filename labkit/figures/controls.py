"""How plotly.js draws, in every place: no control of a chart sends anything anywhere, in any version of plotly.js, and
each can be reached with a keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "typesetMath": False,
    "modeBarButtonsToRemove": [
        *("select2d", "lasso2d", "autoScale2d"),
        *("sendDataToCloud", "sendChartToCloud", "editInChartStudio"),
    ],
}


def tools() -> str:
    """The JavaScript function `accessible`, which is called with the box of a chart after plotly.js has drawn it."""
    return (Path(__file__).parent / "static" / "tools.js").read_text(encoding="utf-8")
