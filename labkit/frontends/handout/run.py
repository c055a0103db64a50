"""One run as a page: its figures, findings, ledger and ranks, each rank's log, the script and its diff."""

from __future__ import annotations

from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.common.text import escape
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.frontends.handout import pieces
from labkit.frontends.handout.clean import Prose
from labkit.frontends.handout.page import Page
from labkit.frontends.handout.plots import Plots
from labkit.record.files import NotPlain
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState


class RunError(Exception):
    """A run cannot be rendered as a page; the message is one sentence. `unfinished` is True if waiting helps."""

    def __init__(self, message: str, unfinished: bool = False):
        super().__init__(message)
        self.unfinished = unfinished


def run_page(folder: RunFolder) -> Page:
    """The page of a recorded run. Raises `RunError` if the run is still active, never started, or was not recorded by
    labkit.
    """
    state = _recorded(folder)
    plots, prose = Plots(), Prose()
    found = findings(state)
    parts = {
        "Findings": findings_html(found) if found else "<p>No problem found.</p>",
        "Figures": plots.charts(state),
        "Ranks": ranks_html(folder.name, state),
        "Communication": ledger_html(ledger(state)),
        "Logs": pieces.logs(folder, state),
        "Script": pieces.script(folder, state) + pieces.diff(folder, state) + _command(folder),
    }
    body = "".join(f"<h2>{name}</h2>{html}" for name, html in parts.items() if html)
    title = f"{pieces.title(state)} · {folder.name}"
    about = pieces.facts(state, recorded=True)
    return Page(title, about, prose.lay_out(f"<h1>{escape(title)}</h1>{body}"), prose.contents, plots)


def _recorded(folder: RunFolder) -> RunState:
    spec = folder.read_spec()
    if spec.strategy is None and spec.script is None:
        missing = f"its {folder.spec.name} names neither a strategy nor a script"
        raise RunError(f"{folder.path} was not recorded by labkit: {missing}")
    follower = Follower(folder)
    follower.poll()
    state = follower.state
    if state.status.state == "ready":
        raise RunError(f"run {folder.name} was interrupted before it started: it has no {folder.status.name}")
    if not state.over:
        raise RunError(
            f"run {folder.name} is still active ({state.words}); "
            f"wait until it ends, or stop it with: labkit stop {folder.name}",
            unfinished=True,
        )
    return state


def _command(folder: RunFolder) -> str:
    try:
        command = folder.text(folder.command).strip()
    except NotPlain as error:
        return f"<p>The command is not shown: {escape(str(error))}.</p>"
    except OSError:
        return ""
    return f"<p>Command:</p><pre>{pieces.printed(command)}</pre>"
