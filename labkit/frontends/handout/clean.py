"""Sanitises the HTML of cells: what is allowed, and what removes the rest."""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import nh3
from bs4 import BeautifulSoup
from latex2mathml.converter import convert
from nbconvert.filters import markdown2html

from labkit.common.files import read_regular
from labkit.common.text import escape

# ---- formulas

_TEX = re.compile(r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])", re.DOTALL)
_VERBATIM = ("code", "pre", "kbd", "samp")


def draw_formulas(soup: BeautifulSoup) -> None:
    """Replaces `$…$` and `$$…$$` in the text by MathML; text that is not valid TeX stays unchanged."""
    for text in soup.find_all(string=_TEX):
        if not text.find_parent(_VERBATIM):
            text.replace_with(BeautifulSoup(_drawn(str(text)), "html.parser"))


def _drawn(text: str) -> str:
    """A text as HTML, with its formulas as MathML."""
    pieces, end = [], 0
    for formula in _TEX.finditer(text):
        pieces += [escape(text[end : formula.start()]), _formula(formula)]
        end = formula.end()
    return "".join([*pieces, escape(text[end:])])


def _formula(found: re.Match[str]) -> str:
    block = found["block"]
    try:
        drawn = convert(block or found["inline"], display="block" if block else "inline")
    except Exception:  # its errors have no common base class; some are IndexError and KeyError
        return escape(found[0])
    return f'<span class="formula">{drawn}</span>' if block else drawn


# ---- what foreign HTML may contain in a handout

# Removed with all that is in them; of other elements that are not allowed, the content stays.
REMOVED = {
    *("script", "style", "iframe", "frame", "frameset", "noframes", "noscript", "noembed", "template"),
    *("object", "embed", "applet", "form", "select", "textarea", "audio", "video", "canvas"),
}
_SVG = {"svg", "g", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan", "title"}
_MATHML = {
    *("math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "ms", "mfrac", "msqrt", "mroot", "mstyle", "mpadded"),
    *("mphantom", "menclose", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts"),
    *("mprescripts", "none", "mtable", "mtr", "mtd"),
}
# `header`, `nav` and the like are parts of the page itself
_OWN = {"header", "footer", "nav", "main", "map", "area"}
TAGS = (nh3.ALLOWED_TAGS - REMOVED - _OWN) | {"label", "meter", "progress", "section", "tfoot"} | _SVG | _MATHML

# Attributes of SVG whose value is CSS.
_PRESENTATION = {
    *("fill", "fill-opacity", "fill-rule", "stroke", "stroke-dasharray", "stroke-linecap", "stroke-linejoin"),
    *("stroke-opacity", "stroke-width", "opacity", "transform", "font-family", "font-size", "font-style"),
    *("font-weight", "text-anchor", "dominant-baseline", "color"),
}
_GEOMETRY = {
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "dx", "dy", "r", "rx", "ry", "d", "points", "width", "height"),
    *("viewBox", "preserveAspectRatio"),
}
_FORMULA = {
    *("accent", "accentunder", "columnalign", "columnlines", "columnspacing", "columnspan", "depth", "display"),
    *("displaystyle", "fence", "form", "height", "largeop", "linethickness", "lspace", "mathbackground", "mathcolor"),
    *("mathsize", "mathvariant", "maxsize", "minsize", "movablelimits", "notation", "rowalign", "rowlines"),
    *("rowspacing", "rowspan", "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width"),
}
_TABLE = {"align", "border", "colspan", "rowspan", "scope", "valign"}
ATTRIBUTES: dict[str, set[str]] = {
    "*": {"class", "dir", "id", "lang", "role", "style", "tabindex", "title"},
    "a": {"href"},
    "details": {"open"},
    "img": {"alt", "height", "src", "width"},
    "ol": {"reversed", "start", "type"},
    **{name: {"max", "min", "value"} for name in ("meter", "progress")},
    **dict.fromkeys(("table", "thead", "tbody", "tfoot", "tr", "td", "th", "col", "colgroup", "caption"), _TABLE),
    **dict.fromkeys(_SVG, _PRESENTATION | _GEOMETRY),
    **dict.fromkeys(_MATHML, _FORMULA),
}
_SIDES = ("", "-top", "-right", "-bottom", "-left")
# Nothing that takes an element out of its place, where it could cover the page.
_PROPERTIES = {
    *("color", "opacity", "background", "background-color", "display", "visibility", "vertical-align", "white-space"),
    *("font", "font-family", "font-size", "font-style", "font-variant-numeric", "font-weight", "line-height"),
    *("letter-spacing", "overflow-wrap", "text-align", "text-decoration", "text-indent", "text-transform"),
    *("word-break", "width", "height", "min-width", "min-height", "max-width", "max-height", "overflow"),
    *("overflow-x", "overflow-y", "gap", "flex", "flex-direction", "flex-wrap", "align-items", "justify-content"),
    *("grid-template-columns", "border-collapse", "border-spacing", "border-radius", "table-layout"),
    *("list-style", "list-style-type"),
    *(f"{name}{side}" for name in ("margin", "padding", "border") for side in _SIDES),
    *(f"border-{part}" for part in ("color", "style", "width")),
    *("fill", "stroke", "stroke-width", "stroke-dasharray", "text-anchor"),
}
_FUNCTIONS = {
    *("rgb", "rgba", "hsl", "hsla", "light-dark", "var", "calc", "min", "max", "clamp", "repeat", "minmax"),
    *("translate", "rotate", "scale", "matrix"),
}
_VALUE = re.compile(r"[^\\@<>&{}]*")  # no escape, which could hide the name of a function
_CALL = re.compile(r"([-\w]*)\s*\(")
EMBEDDED = re.compile(r"data:image/(png|jpeg|gif|webp|svg\+xml)[;,]", re.IGNORECASE)


def attribute(name: str, value: str, ids: Collection[str]) -> str | None:
    """The value of an allowed attribute as it may stay; None if it would load something, or is an id that is not one
    of `ids`.
    """
    if name == "id":
        return value if value in ids else None
    if name == "src":
        return value if EMBEDDED.match(value) else None
    if name == "href":
        return None if value.strip().lower().startswith("data:") else value
    if name == "style":
        return ";".join(filter(_is_harmless, value.split(";"))) or None
    return value if name not in _PRESENTATION or _loads_nothing(value) else None


def _is_harmless(declaration: str) -> bool:
    """Whether a declaration of a style sets an allowed property. Each `;` ends one here, even in a string: a browser
    finds no further declarations."""
    name, _, value = declaration.partition(":")
    return name.strip().lower() in _PROPERTIES and _loads_nothing(value)


def _loads_nothing(css: str) -> bool:
    return bool(_VALUE.fullmatch(css)) and _FUNCTIONS.issuperset(_CALL.findall(css.lower()))


# ---- sanitising

_LARGEST = 64 << 20  # bytes of an image
_RESERVED = ("text", "theme", "figures", "plotly")  # ids of the page itself


def clean(html: str, ids: Collection[str] = ()) -> str:
    """The HTML with allowed elements, attributes and styles only, and of its ids only `ids`.

    A link may point to another site; what a browser loads by itself must be embedded in the page. Put the result into
    the page as it is: another parser could read it differently.
    """
    return nh3.clean(
        html,
        tags=TAGS,
        clean_content_tags=REMOVED,
        attributes=ATTRIBUTES,
        generic_attribute_prefixes={"aria-"},
        attribute_filter=lambda element, name, value: attribute(name, value, ids),
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
        path = self._folder / address if self._folder and not EMBEDDED.match(address) else None
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
        address = next(
            candidate for candidate in _numbered(stem) if candidate not in self._taken and candidate not in _RESERVED
        )
        self._taken.add(address)
        return address


def _numbered(stem: str) -> Iterable[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1
