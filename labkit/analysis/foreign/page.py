"""What is said about some files: findings first, then tables, then what cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.analysis.diagnose.finding import Finding


class ForeignError(ValueError):
    """Files that cannot be explained: one sentence with the file, what is wrong with it, and the fix."""


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names something, the other columns are figures, except those in `words`."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """What some files of one kind say. `title` says what they are, `notes` are sentences about what cannot be told, and
    `figures` are the numbers of the tables as plain values: times in seconds, sizes in bytes."""

    title: str
    findings: Sequence[Finding]
    tables: Sequence[Table]
    notes: Sequence[str]
    figures: dict[str, Any] = field(default_factory=dict)
