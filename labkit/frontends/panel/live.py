"""The live view of one run, without the choices: running or over, started here or elsewhere."""

from __future__ import annotations

import ipywidgets

from labkit.frontends.panel.notebook import Keepsake, leave
from labkit.frontends.panel.stage import Stage
from labkit.frontends.panel.view import RunView, style
from labkit.runs.handle import Run
from labkit.runs.notebook import headless


def show_in_notebook(run: Run) -> None:
    """Shows a run live and returns at once; where nobody watches it waits for the run's end and leaves plain figures."""
    if headless():
        to_the_end(run)
    else:
        _live(run)


def to_the_end(run: Run) -> None:
    """Waits for a run's end (an interrupt stops the run) and leaves its plain figures as outputs of the present cell."""
    run.wait()
    leave(run.name, run.state)


def _live(run: Run) -> None:
    from IPython.display import display

    kept: list[Keepsake] = []
    view = RunView(lambda name, state: kept[0].fill(name, state))
    actions = ipywidgets.HBox([view.stop_button, view.words, view.progress, Stage()])
    actions.add_class("labkit-actions")
    tabs = ipywidgets.Tab([view.live, view.logs.widget, view.timeline.widget, view.memory.widget])
    for number, title in enumerate(("Live", "Logs", "Timeline", "Memory")):
        tabs.set_title(number, title)
    tabs.add_class("labkit-tabs")
    widget = ipywidgets.VBox([style(), actions, tabs])
    widget.add_class("labkit")
    display(widget)
    kept.append(Keepsake())
    view.shown()
    view.follow(run)
