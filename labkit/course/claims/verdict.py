"""A claim, the verdict on it, and how both are displayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.common.text import escape

if TYPE_CHECKING:
    from rich.table import Table

    from labkit.course.claims.measured import Trials


HOLDS, FAILS, PARTLY, OPEN = "holds", "does not hold", "partly", "cannot be decided here"
_MARKS = {HOLDS: "✓", FAILS: "✗", PARTLY: "◐", OPEN: "?"}
_HEADS = ("claim", "verdict", "evidence", "how")


@dataclass(frozen=True)
class Ruling:
    """The result of a trial: one of the four verdicts, the evidence in sentences, and the figures behind it by name,
    with one value per measurement."""

    verdict: str
    evidence: str
    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A common claim. `how` it is tested: computed, modelled, measured, published by others, asked of torch and the
    system, documented, or argued.

    `judge` gets the measurements, and `needs` names the jobs in `trials.JOBS` that it requires.
    """

    name: str
    says: str
    how: str
    judge: Callable[[Trials], Ruling]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A claim and the ruling on it; `runs` are the names of the runs that the ruling is based on."""

    claim: Claim
    ruling: Ruling
    runs: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One of: holds, does not hold, partly, cannot be decided here."""
        return self.ruling.verdict

    @property
    def marked(self) -> str:
        """The verdict with its mark."""
        return f"{_MARKS[self.verdict]} {self.verdict}"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Claim, verdict, evidence, how it was tested."""
        return self.claim.says, self.marked, self.ruling.evidence, self.claim.how

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        plain = {"name": self.claim.name, "says": self.claim.says, "how": self.claim.how, "runs": list(self.runs)}
        return plain | asdict(self.ruling)


class Verdicts(tuple[Verdict, ...]):
    """The page of claims: a table in a notebook, and text elsewhere."""

    def __repr__(self) -> str:
        return "\n".join(
            f"“{says}”\n    {marked} ({how})\n    {evidence}"
            for says, marked, evidence, how in (verdict.cells for verdict in self)
        )

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        return (
            "<table"
            f' class="labkit-claims"><thead><tr>{heads}</tr></thead><tbody>{"".join(map(_row, self))}</tbody></table>'
        )

    def __rich__(self) -> Table:
        from rich.table import Column, Table
        from rich.text import Text

        says, verdict, evidence, how = _HEADS
        columns = (
            Column(says, ratio=3),
            Column(verdict, min_width=12),
            Column(evidence, ratio=6, overflow="fold"),
            Column(how),
        )
        table = Table(*columns, expand=True, show_lines=True)
        for row in self:
            table.add_row(*map(Text, row.cells))
        return table


def _row(verdict: Verdict) -> str:
    says, marked, evidence, how = map(escape, verdict.cells)
    left = "text-align:left;vertical-align:top"
    cells = (("", says), (";white-space:nowrap;font-weight:bold", marked), ("", evidence), ("", how))
    return "<tr>" + "".join(f'<td style="{left}{more}">{text}</td>' for more, text in cells) + "</tr>"
