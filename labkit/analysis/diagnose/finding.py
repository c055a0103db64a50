"""The Finding itself, and helpers that several rules share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from labkit.record.documents import FindingFigures

if TYPE_CHECKING:
    from labkit.record.state import RunState

DDP = "DistributedDataParallel"  # the class name, as the probe records it


@dataclass(frozen=True)
class Finding:
    """One finding.

    `kind` is "wrong" (the run failed or trains incorrectly), "slow", "memory", or "unseen" (part of the run was not
    recorded). `title` says what happened, to which rank and where; `evidence` gives the figures or messages that show
    it; `cause` says why it happened, and `fix` what to change. `ranks` are the ranks concerned.
    """

    name: str
    kind: str
    title: str
    evidence: str
    cause: str
    fix: str
    ranks: tuple[int, ...] = ()

    def recorded(self) -> FindingFigures:
        """The finding as the summary has it."""
        return FindingFigures(**asdict(self) | {"ranks": list(self.ranks)})


def texts(state: RunState) -> Iterator[tuple[int | None, str]]:
    """Error messages with their rank, each text once: the first failure's, then the other ranks', then torchrun's."""
    known: set[str] = set()
    for rank, text in _texts(state):
        if text not in known:
            known.add(text)
            yield rank, text


def _texts(state: RunState) -> Iterator[tuple[int | None, str]]:
    failure = state.failure
    if failure is not None:
        yield failure.rank, f"{failure.type}: {failure.message}"
    for rank in state.ranks.values():
        if rank.error:
            yield rank.rank, f"{rank.error.type}: {rank.error.message}"
    for number, failed in (state.status.failures or {}).items():
        yield int(number), str(failed.message)
    yield None, str(state.status.message or "")


def shorter(text: str, most: int = 300) -> str:
    """A text on one line, cut to at most `most` characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 3] + "…"
