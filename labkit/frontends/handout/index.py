"""The course as a folder of pages, one per lab, with an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bs4 import BeautifulSoup
from nbformat import NotebookNode

from labkit.common.text import escape
from labkit.frontends.handout import pieces
from labkit.frontends.handout.clean import markdown
from labkit.frontends.handout.files import LabError, read_lab
from labkit.frontends.handout.lab import READERS, lab_page
from labkit.frontends.handout.page import Page


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
    about = " · ".join(filter(None, (f"created {pieces.day(None)}", READERS.get(audience, ""))))
    return Page(title, about, f'<h1>{title}</h1><ul class="labs">{"".join(rows)}</ul>')


def opening(notebook: NotebookNode) -> tuple[str, str]:
    """A lab's title and its first paragraph, as plain text."""
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    soup = BeautifulSoup(markdown(first), "html.parser")
    heading, paragraph = soup.find(["h1", "h2"]), soup.find("p")
    return tuple(each.get_text(" ", strip=True) if each else "" for each in (heading, paragraph))
