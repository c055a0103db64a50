"""The terminal front end: draws a RunState with rich, and shows the same facts as the panel."""

from labkit.frontends.terminal.views import (
    advice_tables,
    atlas_table,
    comparison,
    estimate_tables,
    explanation,
    leases_table,
    line,
    prediction_table,
    runs_table,
    scaling_tables,
    view,
    watch,
    watch_comparison,
)

__all__ = [
    "advice_tables",
    "atlas_table",
    "comparison",
    "estimate_tables",
    "explanation",
    "leases_table",
    "line",
    "prediction_table",
    "runs_table",
    "scaling_tables",
    "view",
    "watch",
    "watch_comparison",
]
