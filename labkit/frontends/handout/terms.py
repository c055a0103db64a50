"""Terms of the glossary on a page: a link with the definition at the first mention, and a table of the terms at the
end."""

from __future__ import annotations

from collections.abc import Callable

from bs4 import BeautifulSoup, NavigableString, Tag

from labkit.common.text import escape
from labkit.course.glossary import Term, mentions

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
