"""A self-contained page: style sheet, scripts, plotly.js and data are in one file, and no host is contacted."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from labkit.common.atomic import MARK
from labkit.common.text import visible_line
from labkit.figures import colours
from labkit.figures.controls import CONFIG
from labkit.frontends.handout.files import write
from labkit.frontends.handout.plots import Plots, packed, plotly_js

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
                css=Markup((HERE / "static" / "handout.css").read_text(encoding="utf-8")),
                js=Markup(js),
                figures=Markup(self.plots.block()) if len(self.plots) else "",
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
    """The page's own script, which replaces the two greys of the charts by the theme's colours."""
    source = (HERE / "static" / "handout.js").read_text(encoding="utf-8")
    source = source.replace("%INK%", colours.INK).replace("%GRID%", colours.GRID)
    return source.replace("%CONFIG%", json.dumps(CONFIG))


def _hash(program: str) -> str:
    """The hash of a script for the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(program.encode()).digest()).decode('ascii')}'"
