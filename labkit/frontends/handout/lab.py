"""A lab as a page: its cells, formulas and terms, and the index of several."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup, NavigableString, Tag
from nbconvert import HTMLExporter
from nbconvert.filters import Highlight2HTML
from nbformat import NotebookNode

from labkit.common.text import escape
from labkit.course.exercises import exercise
from labkit.course.glossary import Term, mentions
from labkit.frontends.handout import clean, page
from labkit.frontends.handout.clean import Prose, markdown
from labkit.frontends.handout.execute import LabError, executed, read_lab
from labkit.frontends.handout.page import TEMPLATES, Page, Plots
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.packed import SHIPPED
from labkit.record.state import RunState

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
            if type(text) is NavigableString and not text.find_parent(
                _UNMARKED
            ):  # subclasses are comments and the like
                self._mark(text)
        return str(soup)

    def _mark(self, text: NavigableString) -> None:
        parts: list[str | Tag] = []
        end = 0
        for start, stop, term in mentions(text):
            if term not in self._anchors:
                self._anchors[term] = self._address(f"term {term.name}")
                link = Tag(
                    name="a", attrs={"class": "term", "href": f"#{self._anchors[term]}", "title": term.definition}
                )
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
        ran = self._recorded or f"executed {page.day(None)}"
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
            inner = f'<pre class="{output.name}">{page.printed(output.text)}</pre>'
        elif output.output_type == "error":
            inner = f'<pre class="error">{page.printed(chr(10).join(output.traceback))}</pre>'
        else:
            inner = self._data(output.data)
        return f'<div class="output">{inner}</div>' if inner else ""

    def _data(self, data: dict[str, Any]) -> str:
        """A displayed value, in the richest format that a page without a kernel can show."""
        html = "".join(data.get("text/html", ""))
        if _PLOTLY in data:
            named = _RUN.match("".join(data.get("text/plain", "")))
            state = self._state(named[1]) if named else None
            return (
                self.plots.machine(state) + self.plots.charts(state)
                if state
                else self.plots.add(data[_PLOTLY], clean.clean(html) if "<svg" in html else "")
            )
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
        return "" if not text or _HANDLE.match(text) else f"<pre>{page.printed(text)}</pre>"

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
        self._places.append(page.place(state))
        mark = '<span class="recorded">recorded</span> ' if self._recorded else ""
        head = f"<p>{mark}<b>{escape(page.title(state))}</b> {escape(page.facts(state, bool(self._recorded)))}</p>"
        inner = page.logs(folder, state) + self._script(folder, state) if folds else ""
        return f'<div class="run">{head}{inner}</div>'

    def _script(self, folder: RunFolder, state: RunState) -> str:
        """The script of a run. On paper the first one of the page is enough, and of others what differs from one
        device, once for each strategy."""
        first, new = not self._printed, state.spec.strategy not in self._printed
        self._printed.add(state.spec.strategy)
        return page.script(folder, state, printed=first) + page.diff(folder, state, printed=new)


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
    about = " · ".join(filter(None, (f"created {page.day(None)}", READERS.get(audience, ""))))
    return Page(title, about, f'<h1>{title}</h1><ul class="labs">{"".join(rows)}</ul>')


def opening(notebook: NotebookNode) -> tuple[str, str]:
    """A lab's title and its first paragraph, as plain text."""
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    soup = BeautifulSoup(markdown(first), "html.parser")
    heading, paragraph = soup.find(["h1", "h2"]), soup.find("p")
    return tuple(element.get_text(" ", strip=True) if element else "" for element in (heading, paragraph))
