"""The pages of handouts: of a lab, the course, a run and a class, with everything that makes them work offline."""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup, NavigableString, Tag
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters import Highlight2HTML
from nbformat import NotebookNode
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
from labkit.course.exercises import exercise
from labkit.course.glossary import Term, mentions
from labkit.figures import colours, machine, rank_colour
from labkit.figures.as_plotly import inert
from labkit.figures.controls import CONFIG, tools
from labkit.figures.machine import as_json, film, stills
from labkit.figures.tables import findings_html, ledger_html, ranks_html
from labkit.frontends.handout import clean
from labkit.frontends.handout.clean import Prose, markdown
from labkit.frontends.handout.execute import LabError, executed, read_lab, write
from labkit.plan.script import write_script
from labkit.plan.spec import SpecError
from labkit.record.files import LogTail, NotPlain
from labkit.record.folder import STREAMS, RunFolder
from labkit.record.follow import Follower
from labkit.record.packed import SHIPPED
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
        return f"{counted(number, 'CPU rank')} (no GPU)"
    return counted(number, "rank")


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
        css = (HERE / "static" / "handout.css").read_text(encoding="utf-8") + machine.style()
        template = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("page.html.j2")
        return template.render(
            mark=MARK,
            title=visible_line(self.title),
            about=visible_line(self.about),
            body=Markup(self.body),
            contents=[(level, at, visible_line(text)) for level, at, text in self.contents if level in (2, 3)],
            hashes=Markup(" ".join(map(_hash, programs))),
            css=Markup(css),
            js=Markup(js),
            figures=Markup(self.plots.block()) if len(self.plots) else "",
            films=Markup(self.plots.films()),
            plotly=Markup(_plotly()),
        )

    def write(self, path: Path) -> Path:
        """Writes the file atomically and returns `path`. Raises `OSError`."""
        return write(path, self.html())


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


# ---- terms of the glossary on a page

_UNMARKED = (
    *("a", "abbr", "button", "code", "kbd", "math", "pre", "samp", "summary", "svg", "th"),
    *("h1", "h2", "h3", "h4", "h5", "h6"),
)


class Terms:
    """The terms that a page mentions; `address` makes the anchor of each, which no other element of the page has."""

    def __init__(self, address: Callable[[str], str]):
        self._address = address
        self._anchors: dict[Term, str] = {}

    def mark(self, html: str) -> str:
        """HTML in which the first mention of each term links to its row in the table; the link shows the definition on
        hover.

        Code, formulas, headings and links are unchanged.
        """
        soup = BeautifulSoup(html, "html.parser")
        for text in soup.find_all(string=True):
            is_text = type(text) is NavigableString  # subclasses are comments and the like
            if is_text and not text.find_parent(_UNMARKED):
                self._mark(text)
        return str(soup)

    def _mark(self, text: NavigableString) -> None:
        parts: list[str | Tag] = []
        end = 0
        for start, stop, term in mentions(text):
            if term not in self._anchors:
                anchor = self._anchors[term] = self._address(f"term {term.name}")
                link = Tag(name="a", attrs={"class": "term", "href": f"#{anchor}", "title": term.definition})
                link.string = text[start:stop]
                parts += [text[end:start], link]
                end = stop
        if parts:
            text.replace_with(*parts, text[end:])

    def table(self) -> str:
        """The definitions of the terms that were marked, in alphabetical order, as HTML; empty if there are none."""
        rows = "".join(
            f'<tr id="{escape(anchor)}"><td>{escape(term.name)}</td><td>{escape(term.definition)}</td></tr>'
            for term, anchor in sorted(self._anchors.items(), key=lambda item: item[0].name.casefold())
        )
        head = "<thead><tr><th>Term</th><th>Definition</th></tr></thead>"
        return rows and f'<div class="wide-table"><table>{head}<tbody>{rows}</tbody></table></div>'


# ---- a lab as a page

STUDENT, TEACHER = "student", "teacher"
READERS = {STUDENT: "student version, without answers", TEACHER: "teacher version, with answer key"}
_PLOTLY = "application/vnd.plotly.v1+json"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_RUN = re.compile(r"\A[\w, ]+ of ([^\s/\\]+): ")  # the plain text of a run's figures, which names the run
_HANDLE = re.compile(r"\A<Run \S+: .*>\Z", re.DOTALL)  # the return value of `show`; the run is already displayed
_PROGRESS = re.compile(r"\bmy_progress\(")
_CHECKED = re.compile(r"\bcheck\(\s*[\"']([\w.]+)[\"']")


def lab_page(
    path: Path, *, audience: str = "", recorded: Path | None = None, report: Callable[[str], None] = lambda words: None
) -> Page:
    """Executes the lab at `path` and returns its page; with `recorded`, a folder of runs, those are used instead of new
    ones.

    `audience` is student (no answers, no verdicts), teacher (with the answer key of every exercise) or empty
    (unchanged). `report` is called with the progress. Raises `LabError` if the lab cannot be read, a cell fails, or a
    run was never recorded.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-runs-") as place:
        notebook = executed(path, runs=Path(place), recorded=recorded, report=report)
        report("rendering the page")
        return page_of(notebook, Path(path), Path(place), audience=audience, recorded=_words(recorded))


def _words(recorded: Path | None) -> str:
    if recorded is None:
        return ""
    return "with runs of its strategies in other settings" if recorded == SHIPPED else "with recorded runs"


def page_of(notebook: NotebookNode, path: Path, runs: Path, *, audience: str = "", recorded: str = "") -> Page:
    """The page of an executed lab, whose run folders are in `runs`; `recorded` says whose runs these are, if not its
    own."""
    cells = _Cells(path.parent, runs, audience, recorded)
    body = cells.html(notebook) + cells.glossary()
    heading = next((text for level, _, text in cells.prose.contents if level == 1), path.stem)
    return Page(heading, cells.about, body, cells.prose.contents, cells.plots)


class _Cells:
    """The filters of the template, and the contents, figures and devices that they collect from the cells."""

    def __init__(self, folder: Path, runs: Path, audience: str, recorded: str):
        self._runs, self._audience, self._recorded = runs, audience, recorded
        self.prose = Prose(answers=audience != STUDENT, folder=folder)
        self.terms = Terms(self.prose.address)
        self.plots = Plots()
        self._places: list[str] = []
        self._printed: set[str | None] = set()  # the strategies whose scripts are on paper
        self._states: dict[str, Any] = {}

    @property
    def about(self) -> str:
        """Where and when the lab ran, and the audience."""
        ran = self._recorded or f"executed {day(None)}"
        where = f"on {', '.join(dict.fromkeys(self._places))}" if self._places else ""
        return " · ".join(filter(None, (f"{ran} {where}".strip(), READERS.get(self._audience, ""))))

    def html(self, notebook: NotebookNode) -> str:
        filters = {
            "prose": self.text,
            "show": self.show,
            "under": self.under,
            "highlight_code": Highlight2HTML(pygments_lexer="ipython3"),
        }
        exporter = HTMLExporter(
            template_name="handout",
            extra_template_basedirs=[str(TEMPLATES)],
            filters=filters,
            exclude_anchor_links=True,
            exclude_input_prompt=True,
            exclude_output_prompt=True,
        )
        # HTMLExporter's own method would read the sanitised page with another parser, and write it again
        html, _ = super(HTMLExporter, exporter).from_notebook_node(notebook)
        return html

    def text(self, html: str) -> str:
        """One markdown cell, with its terms linked to the glossary of the page."""
        return self.prose.take(html, self.terms.mark)

    def glossary(self) -> str:
        """A section that defines the terms of the page; empty if it mentions none."""
        table = self.terms.table()
        return self.prose.lay_out("<h2>Terms</h2>") + table if table else ""

    # ---- outputs

    def show(self, output: NotebookNode, cell: NotebookNode) -> str:
        """One output of a cell."""
        if _PROGRESS.search(cell.source) or (
            self._audience == STUDENT and "exercise" in output.get("metadata", {}).get("labkit", {})
        ):
            return ""  # the learner's progress, which a handout does not have
        if output.output_type == "stream":
            inner = f'<pre class="{output.name}">{printed(output.text)}</pre>'
        elif output.output_type == "error":
            inner = f'<pre class="error">{printed(chr(10).join(output.traceback))}</pre>'
        else:
            inner = self._data(output.data)
        return f'<div class="output">{inner}</div>' if inner else ""

    def _data(self, data: dict[str, Any]) -> str:
        """A displayed value, in the richest format that a page without a kernel can show."""
        html = "".join(data.get("text/html", ""))
        if _PLOTLY in data:
            named = _RUN.match("".join(data.get("text/plain", "")))
            state = self._state(named[1]) if named else None
            if state:
                return self.plots.machine(state) + self.plots.charts(state)
            return self.plots.add(data[_PLOTLY], clean.clean(html) if "<svg" in html else "")
        if html:
            return clean.output(html)
        if "text/markdown" in data:
            return markdown("".join(data["text/markdown"]))
        for kind in ("image/png", "image/jpeg"):
            if kind in data:
                return f'<img alt="figure" src="data:{kind};base64,{escape("".join(data[kind].split()), quote=True)}">'
        if "image/svg+xml" in data:
            picture = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode("ascii")
            return f'<img alt="figure" src="data:image/svg+xml;base64,{picture}">'
        if _WIDGET in data:
            return "<p>This output is interactive: open the notebook to use its controls.</p>"
        text = "".join(data.get("text/plain", ""))
        return "" if not text or _HANDLE.match(text) else f"<pre>{printed(text)}</pre>"

    # ---- below a cell

    def under(self, cell: NotebookNode) -> str:
        """The runs that a cell started, and in the teacher version the answer key of its exercise."""
        # the magic itself shows each rank's output and the script
        shown = cell.source.lstrip().startswith("%%torchrun")
        html = "".join(self._run(name, folds=not shown) for name in cell.metadata.get("labkit_runs", ()))
        named = _CHECKED.search(cell.source) if self._audience == TEACHER else None
        return html + (self._key(named[1]) if named else "")

    def _key(self, name: str) -> str:
        try:
            asked = exercise(name)
        except LookupError as error:
            raise LabError(str(error)) from None
        return f'<div class="key"><b>Answer key: {escape(asked.title)}</b>{markdown(asked.key)}</div>'

    def _state(self, name: str) -> Any:
        """The state of a run of this lab; None if there is no run of this name."""
        if name not in self._states:
            folder = RunFolder(self._runs / name)
            follower = Follower(folder)
            follower.poll()
            self._states[name] = follower.state if folder.spec.is_file() else None
        return self._states[name]

    def _run(self, name: str, folds: bool) -> str:
        folder, state = RunFolder(self._runs / name), self._state(name)
        self._places.append(place(state))
        mark = '<span class="recorded">recorded</span> ' if self._recorded else ""
        head = f"<p>{mark}<b>{escape(title(state))}</b> {escape(facts(state, bool(self._recorded)))}</p>"
        inner = logs(folder, state) + self._script(folder, state) if folds else ""
        return f'<div class="run">{head}{inner}</div>'

    def _script(self, folder: RunFolder, state: RunState) -> str:
        """The script of a run. On paper the first one of the page is enough, and of others what differs from one
        device, once for each strategy."""
        first, new = not self._printed, state.spec.strategy not in self._printed
        self._printed.add(state.spec.strategy)
        return script(folder, state, printed=first) + diff(folder, state, printed=new)


# ---- the course as a folder of pages, one per lab, with an index


def course(
    labs: list[Path],
    site: Path,
    *,
    audience: str = "",
    recorded: Path | None = None,
    report: Callable[[str], None] = lambda words: None,
) -> tuple[list[Path], list[str]]:
    """Writes a page for each lab and `index.html` to the folder `site`; returns the files, and one sentence per failed
    lab.

    A lab that fails gets no page; the others are still written. Raises `OSError` if `site` cannot be written.
    """
    made, failed = [], []
    for path in labs:
        try:
            page = lab_page(
                path,
                audience=audience,
                recorded=recorded,
                report=lambda words, path=path: report(f"{path.stem}, {words}"),
            )
        except LabError as error:
            failed.append(str(error))
            continue
        made.append((path, page.write(site / f"{path.stem}.html"), page))
    index = _index([(path, file, page.about) for path, file, page in made], audience).write(site / "index.html")
    return [index, *(file for _, file, _ in made)], failed


def _index(labs: list[tuple[Path, Path, str]], audience: str) -> Page:
    rows = []
    for path, file, about in labs:
        title, question = opening(read_lab(path))
        rows.append(
            f'<li><a href="{escape(file.name, quote=True)}">{escape(title)}</a>'
            f"<p>{escape(question)}</p><p>{escape(about)}</p></li>"
        )
    title = "PyTorch distributed training: the labs"
    about = " · ".join(filter(None, (f"created {day(None)}", READERS.get(audience, ""))))
    return Page(title, about, f'<h1>{title}</h1><ul class="labs">{"".join(rows)}</ul>')


def opening(notebook: NotebookNode) -> tuple[str, str]:
    """A lab's title and its first paragraph, as plain text."""
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    soup = BeautifulSoup(markdown(first), "html.parser")
    heading, paragraph = soup.find(["h1", "h2"]), soup.find("p")
    return tuple(element.get_text(" ", strip=True) if element else "" for element in (heading, paragraph))
