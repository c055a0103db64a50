"""One term of the glossary. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
