"""How plotly.js draws, in every place: no control of a chart sends anything anywhere, in any version of plotly.js."""

from __future__ import annotations

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
