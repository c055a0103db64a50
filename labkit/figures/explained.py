"""What files of a job say that ran anywhere, as text, HTML and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from labkit.analysis.foreign import Page
from labkit.common.text import escape, visible
from labkit.figures.prediction import table_html
from labkit.figures.tables import Findings, findings_html, table_text

NO_FINDINGS = "Nothing stands out."


class Explained:
    """The pages about some files, one for each kind of files: findings first, then tables, then what cannot be told.
    `run` is the name of the run that they were kept as, empty if they were not."""

    def __init__(self, pages: Sequence[Page], run: str = ""):
        self.pages = tuple(pages)
        self.run = run

    @property
    def findings(self) -> Findings:
        """What happened, the most important first."""
        return Findings(finding for page in self.pages for finding in page.findings)

    def to_json(self) -> dict[str, Any]:
        """The pages as plain values. Times are in seconds, sizes in bytes."""
        return {
            **({"run": self.run} if self.run else {}),
            "pages": [
                {
                    "title": page.title,
                    "findings": [asdict(finding) for finding in page.findings],
                    "notes": list(page.notes),
                    **page.figures,
                }
                for page in self.pages
            ],
        }

    def __repr__(self) -> str:
        parts = []
        for page in self.pages:
            parts += [page.title, repr(Findings(page.findings)) if page.findings else NO_FINDINGS]
            parts += [f"{table.title}\n{table_text(table.heads, table.rows, table.words)}" for table in page.tables]
            parts.append("\n".join(page.notes))
        return visible("\n\n".join(filter(None, parts)))

    def _repr_html_(self) -> str:
        parts = []
        for page in self.pages:
            parts += [f"<h4>{escape(page.title)}</h4>", findings_html(page.findings) or f"<p>{NO_FINDINGS}</p>"]
            for table in page.tables:
                parts += [f"<p><b>{escape(table.title)}</b></p>", table_html(table.heads, table.rows, table.words)]
            parts += [f"<p>{escape(note)}</p>" for note in page.notes]
        return "".join(parts)
