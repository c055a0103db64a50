"""Sanitises HTML from cells for a page that contacts no host and runs no foreign script, by the lists in `allowed.py`.

The page's content security policy is a second line of defence: it allows only the page's own scripts.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import nh3
from bs4 import BeautifulSoup
from nbconvert.filters import markdown2html

from labkit.common.reading import read_regular
from labkit.frontends.handout import allowed
from labkit.frontends.handout.formulas import draw_formulas

_LARGEST = 64 << 20  # bytes of an image
_RESERVED = ("text", "theme", "figures", "plotly")  # ids of the page itself


def clean(html: str, ids: Collection[str] = ()) -> str:
    """The HTML with allowed elements, attributes and styles only, and of its ids only `ids`.

    A link may point to another site; what a browser loads by itself must be embedded in the page. Put the result into
    the page as it is: another parser could read it differently.
    """
    return nh3.clean(
        html,
        tags=allowed.TAGS,
        clean_content_tags=allowed.REMOVED,
        attributes=allowed.ATTRIBUTES,
        generic_attribute_prefixes={"aria-"},
        attribute_filter=lambda element, name, value: allowed.attribute(name, value, ids),
        url_schemes={"http", "https", "mailto", "data"},
        link_rel=None,
    )


def output(html: str) -> str:
    """The HTML of an output, sanitised; wide tables scroll."""
    soup = BeautifulSoup(html, "html.parser")
    _box_tables(soup)
    return clean(str(soup))


def markdown(text: str) -> str:
    """Markdown as sanitised HTML."""
    soup = BeautifulSoup(markdown2html(text), "html.parser")
    for link in soup.select("a.anchor-link"):
        link.decompose()
    draw_formulas(soup)
    return clean(str(soup))


def _box_tables(soup: BeautifulSoup) -> None:
    for table in soup.find_all("table"):
        table.wrap(soup.new_tag("div", attrs={"class": "wide-table"}))


class Prose:
    """Converts the markdown cells of a page: gives headings ids and collects them in `contents` as (level, id, text).

    Images from files under `folder` are embedded in the page.
    """

    def __init__(self, answers: bool = True, folder: Path | None = None):
        self._answers, self._folder = answers, folder
        self.contents: list[tuple[int, str, str]] = []
        self._taken: set[str] = set()

    def take(self, html: str, mark: Callable[[str], str] = str) -> str:
        """The sanitised HTML of one cell; collapsible answers are removed unless `answers`.

        `mark` may change the HTML before it is sanitised.
        """
        soup = BeautifulSoup(html, "html.parser")
        for picture in soup.find_all("img", src=True):
            picture["src"] = self._embedded(picture["src"])
        for element in soup.find_all(id=True):
            del element["id"]
        draw_formulas(soup)
        if not self._answers:
            for fold in soup.select("details.answer"):
                fold.decompose()
        return clean(mark(self._laid_out(soup)), self._taken)

    def lay_out(self, html: str) -> str:
        """HTML of the lab itself, in which every foreign text is escaped: with ids of headings, not sanitised."""
        return self._laid_out(BeautifulSoup(html, "html.parser"))

    def _laid_out(self, soup: BeautifulSoup) -> str:
        _box_tables(soup)
        for heading in soup.find_all(re.compile(r"^h[1-6]$")):
            text = heading.get_text(" ", strip=True)
            heading["id"] = self.address(text)
            self.contents.append((int(heading.name[1]), heading["id"], text))
        return str(soup)

    def _embedded(self, address: str) -> str:
        """A data URL with the image; an address that is not a file of the lab is returned unchanged."""
        path = self._folder / address if self._folder and not allowed.EMBEDDED.match(address) else None
        kind = path and mimetypes.guess_type(path.name)[0]
        if not (path and kind):
            return address
        try:
            return f"data:{kind};base64,{base64.b64encode(read_regular(path, _LARGEST)).decode('ascii')}"
        except (OSError, ValueError):
            return address

    def address(self, text: str) -> str:
        """A unique id for a heading, the same as in a notebook if possible."""
        stem = re.sub(r"\s+", "-", text)
        address = next(each for each in _numbered(stem) if each not in self._taken and each not in _RESERVED)
        self._taken.add(address)
        return address


def _numbered(stem: str) -> Iterable[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1
