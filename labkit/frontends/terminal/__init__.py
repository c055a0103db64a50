"""The terminal front end: draws a RunState with rich, and shows the same facts as the panel."""

from labkit.frontends.terminal.lists import comparison, prediction_table, runs_table
from labkit.frontends.terminal.one_run import line, view
from labkit.frontends.terminal.watching import watch, watch_comparison

__all__ = ["comparison", "line", "prediction_table", "runs_table", "view", "watch", "watch_comparison"]
