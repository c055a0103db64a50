"""What foreign HTML may contain in a handout: elements, attributes, and the properties and functions of its styles.

Everything else is removed. No element here has content that some parsers read as raw text, except the `<title>` of an
SVG shape, its hint: the sanitiser is therefore the last step, and its result is not parsed again.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import nh3

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
    *(
        f"{name}{side}"
        for name in ("margin", "padding", "border")
        for side in ("", "-top", "-right", "-bottom", "-left")
    ),
    *(f"border-{part}" for part in ("color", "style", "width")),
    *("fill", "stroke", "stroke-width", "stroke-dasharray", "text-anchor"),
}
_FUNCTIONS = {
    *("rgb", "rgba", "hsl", "hsla", "var", "calc", "min", "max", "clamp", "repeat", "minmax"),
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
