"""The page of a handout: results of a run, plots, and everything that makes it work offline; and the pages of a run and
of a class."""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from labkit import figures
from labkit.analysis.diagnose import findings
from labkit.analysis.ledger import ledger
from labkit.common.files import MARK
from labkit.common.text import escape, visible, visible_line, visible_log
from labkit.common.units import counted
from labkit.course.classroom import page as class_html
from labkit.course.classroom.overview import Overview
from labkit.figures import colours, machine, rank_colour
from labkit.figures.as_plotly import inert
from labkit.figures.controls import CONFIG, tools
from labkit.figures.machine import as_json, film, stills
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.frontends.handout.clean import Prose
from labkit.frontends.handout.execute import write
from labkit.plan.script import write_script
from labkit.plan.spec import SpecError
from labkit.record.files import LogTail, NotPlain
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState

# ---- the figures of a page


_HEIGHT = 450  # px of a figure without a height; plotly's default
_CHART = 300  # px of a run's chart
_STILL_SIZE = 20_000  # characters; larger static pictures are omitted
_LANE = 30  # px of a lane in a timeline
_STILL = 100  # points per line in a static picture, which is visible only until plotly draws


class Plots:
    """The figures of one page, in the order in which they were added."""

    def __init__(self) -> None:
        self._figures: list[dict[str, Any]] = []
        self._films: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._figures)

    def add(self, figure: dict[str, Any], still: str = "") -> str:
        """Adds a plotly figure, given as plain values, and returns its placeholder; `still` is an `<svg>` shown until
        plotly draws.
        """
        figure = inert(figure)
        self._figures.append(figure)
        layout = figure.get("layout") or {}
        height = layout.get("height")
        height = int(height) if isinstance(height, (int, float)) and 40 <= height <= 4000 else _HEIGHT
        label = escape(_plain(layout.get("title")) or "figure", quote=True)
        waits = "" if still else f'<p class="waits">{label}: needs JavaScript.</p>'
        number = len(self._figures) - 1
        return (
            f'<figure class="plot" data-figure="{number}" style="min-height:{height}px"'
            f' aria-label="{label}"><div class="still">{still}{waits}</div></figure>'
        )

    def machine(self, state: RunState) -> str:
        """The picture of the machine, which moves if the run has a profiled or predicted step: its key frames, and the
        place for the film."""
        shown = film(state)
        if len(shown.frames) < 2:
            return ""
        self._films.append(as_json(shown))
        return (
            f'<div class="machine" data-film="{len(self._films) - 1}"><div class="stills">{stills(state)}</div></div>'
        )

    def charts(self, state: RunState) -> str:
        """The placeholders of all charts of a run, including those of profiled steps if there are any."""
        places = []
        for name in figures.of_run(state):
            figure = json.loads(figures.figure(name, state).to_json())
            lanes = len(figure["layout"]["yaxis"].get("categoryarray", ()))
            figure["layout"]["height"] = 110 + _LANE * lanes if lanes else _CHART
            still = figures.svg(name, state, points=_STILL)
            wide = ' class="wide"' if name == "timeline" else ""
            places.append(f"<div{wide}>{self.add(figure, still if len(still) <= _STILL_SIZE else '')}</div>")
        return f'<div class="charts">{"".join(places)}</div>'

    def block(self) -> str:
        """The data of all figures: JSON, gzip, base64."""
        return packed(json.dumps(self._figures, separators=(",", ":"), allow_nan=False))

    def films(self) -> str:
        """The films of machines, in the same form; empty without any."""
        films = json.dumps(self._films, separators=(",", ":"), allow_nan=False)
        return packed(films) if self._films else ""


def packed(text: str) -> str:
    """A text as gzip in base64, which contains no HTML special characters."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


@lru_cache(maxsize=1)
def plotly_js() -> str:
    """The source of plotly.js from the installed plotly."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _plain(title: Any) -> str:
    """A figure's title without markup."""
    text = title.get("text") if isinstance(title, dict) else title
    return BeautifulSoup(str(text or ""), "html.parser").get_text(" ", strip=True)


# ---- parts of a run


_FILES = 16  # of an imported run that are named
_LINES = 200  # newest lines of a log that a page contains; they are printed too
_LEXERS = {"python": PythonLexer(), "diff": DiffLexer()}


def coloured(text: str, language: str) -> str:
    """Source code with syntax highlighting as CSS classes; `language` is python or diff."""
    return highlight(visible(text), _LEXERS[language], HtmlFormatter(cssclass="source"))


def printed(text: str) -> str:
    """The output of a program as a terminal shows it, without colours."""
    return escape(visible_log(text))


def fold(summary: str, inner: str, kind: str = "") -> str:
    """A collapsible section; `summary` is plain text, `inner` is HTML."""
    return f'<details class="{kind}"><summary>{escape(summary)}</summary>{inner}</details>'


def place(state: RunState) -> str:
    """The devices of a run's ranks: `2 CPU ranks (no GPU)`, `4 × Tesla T4`."""
    ranks = state.ranks.values()
    number = state.world_size
    names = Counter(rank.device_name or "GPU" for rank in ranks if rank.device.startswith("cuda"))
    if names:
        return " + ".join(f"{count} × {name}" for name, count in names.items())
    if any(rank.device == "cpu" for rank in ranks) or state.spec.device == "cpu":
        return f"{number} CPU rank{'' if number == 1 else 's'} (no GPU)"
    return f"{number} rank{'' if number == 1 else 's'}"


def day(seconds: float | None) -> str:
    """A date and time in this machine's time zone: `3 March 2025, 14:05`."""
    return time.strftime("%d %B %Y, %H:%M", time.localtime(seconds)).lstrip("0")


def title(state: RunState) -> str:
    """A run in a few words: `ddp · cnn`, or the script's name."""
    script = state.spec.script
    if script:
        return str(script).replace("\\", "/").rsplit("/", 1)[-1]
    return " · ".join(filter(None, (state.spec.strategy, state.spec.workload)))


def facts(state: RunState, recorded: bool = False) -> str:
    """One line: the state of a run, where it ran and when."""
    when = day(state.status.started) if isinstance(state.status.started, (int, float)) else "at an unknown time"
    ran = f"recorded {when}, on {place(state)}" if recorded else f"ran on {place(state)}, {when}"
    return " · ".join(filter(None, (state.words, ran, state.note)))


def origin(state: RunState) -> str:
    """Which files an imported run was made from, and what they do not say; empty for a run that was launched."""
    if state.imported is None:
        return ""
    files = ", ".join(state.imported.sources[:_FILES])
    more = len(state.imported.sources) - _FILES
    said = [*state.imported.titles, f"{files} and {more:,} more" if more > 0 else files, *state.imported.notes]
    return "".join(f"<p>{escape(visible_line(text))}</p>" for text in said)


def logs(folder: RunFolder, state: RunState) -> str:
    """The output of each rank in a collapsible section; only the newest lines of long logs. An imported run has
    none."""
    if state.imported is not None:
        return ""
    folds = [_log(folder, rank, stream) for rank in range(state.world_size) for stream in STREAMS]
    if state.status.state in ("failed", "lost"):
        folds.append(_text(folder.tail(folder.launcher_log, keep=_LINES), "torchrun", ""))
    return "".join(folds)


def _log(folder: RunFolder, rank: int, stream: str) -> str:
    words = f"rank {rank}" if stream == "stdout" else f"rank {rank}, stderr"
    tail = folder.log_tail(rank, stream, keep=_LINES)
    return _text(tail, words, rank_colour(rank), empty="no output" if stream == "stdout" else "")


def _text(tail: LogTail, words: str, colour: str, empty: str = "") -> str:
    while tail.poll():
        pass
    lines = [*tail.lines, *filter(None, [tail.partial])]
    count = tail.count + bool(tail.partial)
    if not lines:
        return f'<p class="log-of-none">Log of {escape(words)}: {empty}.</p>' if empty else ""
    gone = f"… {count - len(lines):,} earlier lines are in the run folder\n" if count > len(lines) else ""
    style = f' style="--rank:{colour}"' if colour else ""
    body = f"<pre{style}>{gone}{printed(chr(10).join(lines))}</pre>"
    return fold(f"Log of {words} · {counted(count, 'line')}", body, "log")


def script(folder: RunFolder, state: RunState, printed: bool = True) -> str:
    """The script that ran, or the name of a user's script that was not stored; on paper only if it is `printed`."""
    own = None if state.imported else state.spec.script  # of an imported run it is its name
    text = _script_of(folder)
    if isinstance(text, NotPlain):
        return f"<p>The script is not shown: {escape(str(text))}.</p>"
    if text is None:
        return f"<p>Script: {escape(title(state))}, which is not stored with the run.</p>" if own else ""
    return fold(f"Script · {counted(len(text.splitlines()), 'line')}", coloured(text, "python"), _kind(printed))


def diff(folder: RunFolder, state: RunState, printed: bool = True) -> str:
    """The diff between the single-device script and the script that ran; on paper only if it is `printed`."""
    spec, text = state.asked, _script_of(folder)
    if spec is None or not isinstance(text, str) or spec == spec.on_one_device:
        return ""
    try:
        before = write_script(spec.on_one_device)
    except SpecError:
        return ""
    lines = list(
        difflib.unified_diff(before.splitlines(), text.splitlines(), "one device", f"{spec.name}/train.py", lineterm="")
    )
    more, fewer = (sum(line.startswith(sign) and not line.startswith(3 * sign) for line in lines) for sign in "+-")
    words = f"Diff to one device · {more} lines added, {fewer} removed"
    return fold(words, coloured("\n".join(lines), "diff"), _kind(printed))


def _kind(printed: bool) -> str:
    return "code" if printed else "code screen"


def _script_of(folder: RunFolder) -> str | NotPlain | None:
    """The script in the run folder, the reason why it is not shown, or None if the folder has none."""
    try:
        return folder.text(folder.script)
    except NotPlain as error:
        return error
    except OSError:
        return None


# ---- a self-contained page


HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"


@dataclass
class Page:
    """The contents of a page: `about` is one line of plain text below the title, `body` is HTML."""

    title: str
    about: str
    body: str
    contents: list[tuple[int, str, str]] = field(default_factory=list)
    plots: Plots = field(default_factory=Plots)

    def html(self) -> str:
        """The whole file as HTML."""
        js = _program()
        programs = [js, plotly_js()] if len(self.plots) else [js]
        return (
            _environment()
            .get_template("page.html.j2")
            .render(
                mark=MARK,
                title=visible_line(self.title),
                about=visible_line(self.about),
                body=Markup(self.body),
                contents=[(level, at, visible_line(text)) for level, at, text in self.contents if level in (2, 3)],
                hashes=Markup(" ".join(map(_hash, programs))),
                css=Markup((HERE / "static" / "handout.css").read_text(encoding="utf-8") + machine.style()),
                js=Markup(js),
                figures=Markup(self.plots.block()) if len(self.plots) else "",
                films=Markup(self.plots.films()),
                plotly=Markup(_plotly()),
            )
        )

    def write(self, path: Path) -> Path:
        """Writes the file atomically and returns `path`. Raises `OSError`."""
        return write(path, self.html())


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=False)


@lru_cache(maxsize=1)
def _plotly() -> str:
    return packed(plotly_js())


def _program() -> str:
    """The page's own script, which replaces the two greys of the charts by the theme's colours, after what it shares
    with the panel."""
    source = machine.player() + tools() + (HERE / "static" / "handout.js").read_text(encoding="utf-8")
    source = source.replace("%INK%", colours.INK).replace("%GRID%", colours.GRID)
    return source.replace("%CONFIG%", json.dumps(CONFIG))


def _hash(program: str) -> str:
    """The hash of a script for the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(program.encode()).digest()).decode('ascii')}'"


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
    parts = {
        "Findings": findings_html(findings(state)) or "<p>No problem found.</p>",
        "Figures": plots.machine(state) + plots.charts(state),
        "Ranks": ranks_html(folder.name, state),
        "Communication": ledger_html(ledger(state)),
        "Made from": origin(state),
        "Logs": logs(folder, state),
        "Script": script(folder, state) + diff(folder, state) + _command(folder),
    }
    body = "".join(f"<h2>{name}</h2>{html}" for name, html in parts.items() if html)
    head = f"{title(state)} · {folder.name}"
    about = facts(state, recorded=True)
    return Page(head, about, prose.lay_out(f"<h1>{escape(head)}</h1>{body}"), prose.contents, plots)


def class_page(overview: Overview) -> Page:
    """The page of a class."""
    body = f"{class_html.style()}<h1>{escape(class_html.title(overview))}</h1>{class_html.fragment(overview)}"
    return Page(class_html.title(overview), class_html.about(overview), f'<div class="class">{body}</div>')


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
    return f"<p>Command:</p><pre>{printed(command)}</pre>"
