"""Converts TeX formulas between dollar signs to MathML, which browsers render without a library."""

from __future__ import annotations

import re

from bs4 import BeautifulSoup
from latex2mathml.converter import convert

from labkit.common.text import escape

_FORMULA = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])", re.DOTALL
)
_VERBATIM = ("code", "pre", "kbd", "samp")


def draw_formulas(soup: BeautifulSoup) -> None:
    """Replaces `$…$` and `$$…$$` in the text by MathML; text that is not valid TeX stays unchanged."""
    for text in soup.find_all(string=_FORMULA):
        if not text.find_parent(_VERBATIM):
            text.replace_with(BeautifulSoup(_drawn(str(text)), "html.parser"))


def _drawn(text: str) -> str:
    """A text as HTML, with its formulas as MathML."""
    pieces, end = [], 0
    for found in _FORMULA.finditer(text):
        pieces += [escape(text[end : found.start()]), _formula(found)]
        end = found.end()
    return "".join([*pieces, escape(text[end:])])


def _formula(found: re.Match[str]) -> str:
    block = found["block"]
    try:
        drawn = convert(block or found["inline"], display="block" if block else "inline")
    except Exception:  # its errors have no common base class; some are IndexError and KeyError
        return escape(found[0])
    return f'<span class="formula">{drawn}</span>' if block else drawn
