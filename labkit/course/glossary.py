"""The glossary: its terms, looking up a term, and finding terms in a text. `labkit glossary` prints it; handouts
explain terms with it.

The terms are in `glossary.json`: a definition stands alone, because it says what the symbols of its formula are.
Standard library only.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SEPARATORS = re.compile(r"[\s_-]+")
_NEAR = 3  # terms that are suggested for an unknown one


@dataclass(frozen=True)
class Term:
    """A term with its definition, as plain text.

    `also` are other names of the same thing. `ordinary` are words that find the term, but that are not explained in
    running text because they have other meanings there. `related` are names of other terms.
    """

    name: str
    definition: str
    related: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    ordinary: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name with its synonyms in parentheses."""
        return f"{self.name} ({', '.join(self.also)})" if self.also else self.name

    def to_json(self) -> dict[str, Any]:
        """The term as plain values."""
        lists = {"also": list(self.also), "related": list(self.related)}
        return {"term": self.name, "definition": self.definition, **lists}


def _read() -> tuple[Term, ...]:
    rows = json.loads(Path(__file__).with_name("glossary.json").read_text(encoding="utf-8"))
    return tuple(
        Term(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
        for row in rows
    )


TERMS = _read()


def find(text: str) -> Term:
    """The term with this name. Case does not matter, and hyphens, underscores and spaces are equal.

    Raises `LookupError` with the nearest terms if there is none.
    """
    key = _key(text)
    if key in _BY_KEY:
        return _BY_KEY[key]
    parts = [name for name in _BY_KEY if key and key in name]
    near = dict.fromkeys(_BY_KEY[name].name for name in (*difflib.get_close_matches(key, _BY_KEY, n=_NEAR), *parts))
    hint = f"nearest terms: {', '.join(list(near)[:_NEAR])}" if near else "labkit glossary lists all terms"
    raise LookupError(f"{' '.join(text.split())!r} is not in the glossary; {hint}")


def mentions(text: str) -> Iterator[tuple[int, int, Term]]:
    """The terms in a text, in order: start, end and term. Plurals are found, and the longest of several names.

    A word with capital letters in the table must have them in the text: `DP` is a term, `dp` is not.
    """
    for match in _IN_TEXT.finditer(text):
        yield match.start(), match.end(), _BY_KEY[_key(match[1])]


def _key(text: str) -> str:
    return _SEPARATORS.sub(" ", text).strip().casefold()


def _form(name: str) -> str:
    """A name as a pattern in which hyphens and spaces are equal."""
    words = re.split(r"[\s-]", name)
    return r"[\s-]".join(f"(?i:{re.escape(word)})" if word == word.lower() else re.escape(word) for word in words)


_BY_KEY = {_key(name): term for term in TERMS for name in (term.name, *term.also, *term.ordinary)}
_NAMES = sorted((name for term in TERMS for name in (term.name, *term.also)), key=len, reverse=True)
_IN_TEXT = re.compile(rf"(?<![\w-])({'|'.join(map(_form, _NAMES))})(?:s|es)?(?![\w-])")
