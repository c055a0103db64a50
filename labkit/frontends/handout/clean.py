"""Sanitises HTML from cells for a page that contacts no host and runs no foreign script.

The page's content security policy is a second line of defence: it allows only the page's own scripts.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Iterable
from pathlib import Path

from bs4 import BeautifulSoup, Tag
from nbconvert.filters import markdown2html

from labkit.frontends.handout.formulas import draw_formulas

_GONE = (
    "script",
    "style",
    "iframe",
    "frame",
    "frameset",
    "object",
    "embed",
    "applet",
    "link",
    "meta",
    "base",
    "form",
    "template",
    "audio",
    "video",
)
_ADDRESSES = ("href", "src", "xlink:href", "action", "formaction", "srcset", "background", "poster", "data")
_RESERVED = ("text", "theme", "figures", "plotly")  # ids of the page itself
_SAFE = re.compile(r"(https?:|mailto:|#|[^:]*$)", re.IGNORECASE)
_EMBEDDED = re.compile(r"data:image/(png|jpeg|gif|webp|svg\+xml)[;,]", re.IGNORECASE)


def clean(html: str) -> str:
    """The HTML without scripts, event handlers, frames, and addresses that a browser would load or run."""
    soup = BeautifulSoup(html, "html.parser")
    _clean(soup)
    return str(soup)


def markdown(text: str) -> str:
    """Markdown as sanitised HTML."""
    soup = BeautifulSoup(markdown2html(text), "html.parser")
    for link in soup.select("a.anchor-link"):
        link.decompose()
    draw_formulas(soup)
    _clean(soup)
    return str(soup)


def _clean(soup: BeautifulSoup) -> None:
    for element in soup.find_all(True):
        if element.decomposed:
            continue
        if element.name.lower() in _GONE:
            element.decompose()
            continue
        for name in [name for name in element.attrs if not _harmless(element, name)]:
            del element[name]


def _harmless(element: Tag, name: str) -> bool:
    low = name.lower()
    if low in ("id", "name"):
        return False  # they could clash with the page's ids
    if low == "style":
        return "url(" not in element[name].lower()
    return not low.startswith("on") and (low not in _ADDRESSES or _may_stay(element, name))


def _may_stay(element: Tag, name: str) -> bool:
    """A link may point to another site; anything that a browser loads automatically must be embedded in the page."""
    address = re.sub(r"[\x00-\x20]", "", str(element[name]))
    if element.name == "a" and name.lower() == "href":
        return bool(_SAFE.match(address))
    return address.startswith("#") or bool(_EMBEDDED.match(address))


class Prose:
    """Converts the markdown cells of a page: gives headings ids and collects them in `contents` as (level, id, text).

    Images from files under `folder` are embedded in the page.
    """

    def __init__(self, answers: bool = True, folder: Path | None = None):
        self._answers, self._folder = answers, folder
        self.contents: list[tuple[int, str, str]] = []
        self._taken = set(_RESERVED)

    def take(self, html: str) -> str:
        """The sanitised HTML of one cell; collapsible answers are removed unless `answers`."""
        soup = BeautifulSoup(html, "html.parser")
        for picture in soup.find_all("img", src=True):
            picture["src"] = self._embedded(picture["src"])
        draw_formulas(soup)
        _clean(soup)
        if not self._answers:
            for fold in soup.select("details.answer"):
                fold.decompose()
        for table in soup.find_all("table"):
            table.wrap(soup.new_tag("div", attrs={"class": "wide-table"}))
        for heading in soup.find_all(re.compile(r"^h[1-6]$")):
            text = heading.get_text(" ", strip=True)
            heading["id"] = self.address(text)
            self.contents.append((int(heading.name[1]), heading["id"], text))
        return str(soup)

    def _embedded(self, address: str) -> str:
        """A data URL with the image; an address that is not a file of the lab is returned unchanged."""
        path = self._folder / address if self._folder and not _EMBEDDED.match(address) else None
        kind = path and mimetypes.guess_type(path.name)[0]
        if not (path and kind and path.is_file()):
            return address
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"

    def address(self, text: str) -> str:
        """A unique id for a heading, the same as in a notebook if possible."""
        stem = re.sub(r"\s+", "-", text)
        address = next(each for each in _numbered(stem) if each not in self._taken)
        self._taken.add(address)
        return address


def _numbered(stem: str) -> Iterable[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1
