"""A run or a class as a page, and recorded runs in place of new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.common.text import escape
from labkit.course.classroom import page as class_html
from labkit.course.classroom.overview import Overview
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.frontends.handout import page
from labkit.frontends.handout.clean import Prose
from labkit.frontends.handout.page import Page, Plots
from labkit.launch.job import Job
from labkit.plan.spec import Spec, SpecError
from labkit.record.documents import Guesses, SpecFields, plain
from labkit.record.files import NotPlain
from labkit.record.folder import RunFolder, runs_root
from labkit.record.follow import Follower, current_status
from labkit.record.packed import SHIPPED, shipped_like
from labkit.record.state import OVER, RunState

# ---- recorded runs in place of new ones


_OF_A_MACHINE = ("device", "precision", "data_dir")  # fields that `Spec.on` sets for a machine


class RecordedRuns:
    """The finished runs of a folder; each can be taken once."""

    def __init__(self, root: Path):
        self._root = root
        runs, self._unreadable = RunFolder.readable(RunFolder.all(root))
        self._runs = [folder for folder in reversed(runs) if current_status(folder).state in OVER]
        specs = {folder.name: _complete(folder.read_spec()) for folder in self._runs}
        self._asked = {folder.name: _asked(specs[folder.name], _text(folder)) for folder in self._runs}

    def take(self, spec: Spec, source: str | None = None) -> RunFolder:
        """The newest run of the same Spec that was not taken yet; else one that differs only in device and precision.

        `source` is the text of a script generated for this run only. Raises `LookupError` if there is no such run.
        """
        exact = _asked(spec.to_json(), source)
        for wanted in (exact, _anywhere(exact)):
            for folder in self._runs:
                has = self._asked[folder.name]
                if wanted in (has, _anywhere(has)):
                    self._runs.remove(folder)
                    return folder
        raise LookupError(
            f"{self._root} has no further run of {spec.name} with these settings; "
            f"run the lab once with LABKIT_RUNS={self._root}, or create the handout without --recorded"
            + "".join(f"; {name} cannot be read: {why}" for name, why in self._unreadable.items())
        )


class ShippedRuns:
    """The runs that come with the lab: one of each strategy, which takes the place of all of its runs, whatever their
    settings."""

    def take(self, spec: Spec, source: str | None = None) -> RunFolder | None:
        """The run of the same strategy; None for a script of the lab's own, which is started."""
        name = shipped_like(spec.strategy, spec.processes) if spec.strategy and source is None else None
        return RunFolder.find(name) if name else None


def stand_in(folder: str) -> None:
    """Makes every run started in this process a copy of a recorded one from `folder`, with the predictions of the
    lab that starts it."""
    recorded = ShippedRuns() if Path(folder) == SHIPPED else RecordedRuns(Path(folder))
    start_now = Job.start

    def start(
        cls: type[Job],
        spec: Spec,
        *,
        root: Path | None = None,
        source: str | None = None,
        guess: Guesses | None = None,
        **others: Any,
    ) -> Job:
        found = recorded.take(spec, source)
        if found is None:
            return start_now(spec, root=root, source=source, guess=guess, **others)
        place = (root or runs_root()) / found.name
        again = len([*place.parent.glob(f"{place.name}*")])  # of shipped runs: others are taken once
        copied = found.copy(place.with_name(f"{place.name}-{again + 1}") if again else place)
        if guess is not None:
            RunFolder.write_json(copied.guess, guess)
        return cls(copied)

    Job.start = classmethod(start)


def _asked(spec: dict[str, Any], text: str | None) -> dict[str, Any]:
    """The Spec without paths: a checkpoint by the name of its run, a script by its text or file name."""
    script, resume = spec.get("script"), spec.get("resume")
    return spec | {"script": script and (text or Path(script).name), "resume": resume and run_of(Path(resume))}


def _complete(spec: SpecFields) -> dict[str, Any]:
    """A recorded Spec with defaults for fields that its version did not have; unchanged if this version rejects it."""
    try:
        return spec.to_spec().to_json()
    except SpecError:
        return plain(spec)


def run_of(checkpoint: Path) -> str:
    """The name of the run that wrote a checkpoint, or of the checkpoint's folder if no run wrote it."""
    folder = next((parent for parent in (checkpoint, *checkpoint.parents) if parent.name == "checkpoints"), None)
    return folder.parent.name if folder else checkpoint.name


def _text(folder: RunFolder) -> str | None:
    try:
        return folder.text(folder.script)
    except OSError:
        return None


def _anywhere(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in _OF_A_MACHINE}


# ---- one run as a page, and a class


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
        "Figures": plots.machine(state) + plots.charts(state),
        "Ranks": ranks_html(folder.name, state),
        "Communication": ledger_html(ledger(state)),
        "Made from": page.origin(state),
        "Logs": page.logs(folder, state),
        "Script": page.script(folder, state) + page.diff(folder, state) + _command(folder),
    }
    body = "".join(f"<h2>{name}</h2>{html}" for name, html in parts.items() if html)
    title = f"{page.title(state)} · {folder.name}"
    about = page.facts(state, recorded=True)
    return Page(title, about, prose.lay_out(f"<h1>{escape(title)}</h1>{body}"), prose.contents, plots)


def class_page(found: Overview) -> Page:
    """The page of a class."""
    body = f"{class_html.style()}<h1>{escape(class_html.title(found))}</h1>{class_html.fragment(found)}"
    return Page(class_html.title(found), class_html.about(found), f'<div class="class">{body}</div>')


def _recorded(folder: RunFolder) -> RunState:
    spec = folder.read_spec()
    if spec.strategy is None and spec.script is None and folder.read_imported() is None:
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
    return f"<p>Command:</p><pre>{page.printed(command)}</pre>"
