"""From a RunState to causes: what went wrong, by which evidence, and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.state import RunState


@dataclass(frozen=True)
class Finding:
    """One finding. `kind` is "wrong" (the run is not what was meant) or "unseen" (part of it was not measured).

    `ranks` are those that it speaks of.
    """

    name: str
    kind: str
    title: str
    evidence: str
    way_out: str
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self) | {"ranks": list(self.ranks)}


def findings(state: RunState) -> list[Finding]:
    """Every finding about a run, the gravest first."""
    return [finding for rule in RULES for finding in rule(state)]


def first_failure(state: RunState) -> Iterator[Finding]:
    """The rank that failed first, and those that only fell with it."""
    failure = state.failure
    if failure is None:
        return
    rank, collateral = failure["rank"], failure["collateral"]
    says = f"{failure['type']}: {failure['message']}" if failure["message"] else failure["type"]
    fell = f"; {_ranks(collateral)} fell with it" if collateral else ""
    yield Finding(
        name="first_failure",
        kind="wrong",
        title=f"rank {rank} failed first{fell}",
        evidence=says,
        way_out=f"read the end of rank {rank}'s stderr; what the other ranks say follows from it",
        ranks=(rank, *collateral),
    )


def not_watched(state: RunState) -> Iterator[Finding]:
    """What the probe stopped measuring because a part of it failed: figures that follow from it stand still or are missing."""
    for lost in state.unwatched:
        yield Finding(
            name="not_watched",
            kind="unseen",
            title=f"the probe stopped watching {lost['part']} on rank {lost['rank']}",
            evidence=f"{lost['type']}: {lost['message']}",
            way_out="the training itself went on; the rank's events hold the traceback, as an event of kind probe_error",
            ranks=(lost["rank"],),
        )


def not_readable(state: RunState) -> Iterator[Finding]:
    """Lines of the run folder that are no events: cut short, or written over."""
    if state.broken:
        yield Finding(
            name="not_readable",
            kind="unseen",
            title=f"{state.broken} of the run's events could not be read",
            evidence="lines under events/ or in system.jsonl that are cut short, or no events",
            way_out="what could be read is shown; copy the run folder again if it came from elsewhere",
        )


RULES: tuple[Callable[[RunState], Iterator[Finding]], ...] = (first_failure, not_watched, not_readable)


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
