"""From a RunState to causes: what went wrong, by which evidence, and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.state import RunState


@dataclass(frozen=True)
class Finding:
    """One finding. `kind` is "wrong" (the run is not what was meant) or "slow"; `ranks` are those that it speaks of."""

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


RULES: tuple[Callable[[RunState], Iterator[Finding]], ...] = (first_failure,)


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
