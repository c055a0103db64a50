"""The live view of one run without the configuration: running or over, started here or elsewhere."""

from __future__ import annotations

import ipywidgets

from labkit.frontends.panel.notebook import StaticFigures, display_static
from labkit.frontends.panel.presentation import Presentation
from labkit.frontends.panel.view import RunView, style
from labkit.runs.handle import Run
from labkit.runs.notebook import headless


def show_in_notebook(run: Run) -> None:
    """Shows a run live and returns immediately. If headless, waits for the run's end and displays static figures."""
    if headless():
        wait_and_display(run)
    else:
        _live(run)


def wait_and_display(run: Run) -> None:
    """Waits for a run's end (an interrupt stops the run) and displays its static figures as outputs of the current
    cell.
    """
    run.wait()
    display_static(run.name, run.state)


def _live(run: Run) -> None:
    from IPython.display import display

    static: list[StaticFigures] = []
    view = RunView(lambda name, state: static[0].fill(name, state))
    actions = ipywidgets.HBox([view.stop_button, view.words, view.progress, Presentation().box])
    actions.add_class("labkit-actions")
    tabs = ipywidgets.Tab([view.live, view.logs.widget, view.timeline.widget, view.memory.widget])
    for number, title in enumerate(("Live", "Logs", "Timeline", "Memory")):
        tabs.set_title(number, title)
    tabs.add_class("labkit-tabs")
    widget = ipywidgets.VBox([style(), actions, tabs])
    widget.add_class("labkit")
    display(widget)
    static.append(StaticFigures())
    view.shown()
    view.follow(run)
