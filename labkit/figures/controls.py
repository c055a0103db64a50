"""The controls of a chart, wherever plotly.js draws it. It loads no plotly."""

from __future__ import annotations

from typing import Any

# How plotly.js draws: no control of a chart sends anything anywhere, in any version of plotly.js.
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
