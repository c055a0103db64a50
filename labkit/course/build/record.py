"""What one rank records while it runs an answer. The ranks write it as signed JSON; the examiner checks the signature
and adds how far the results are from those of a single device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

COMPUTE, WAIT = "compute", "wait"  # events that are no communication: a matrix product, and the wait for a call
STORE = "store"  # a key or value that passes a store, such as TCPStore
OUTSIDE = -1  # the step of what belongs to no step, or is the trial's own
FORWARD, BACKWARD = "F", "B"  # events of a pipeline: a micro-batch passes a stage
START, END = "start", "end"  # the phases before the first and after the last step


@dataclass
class Event:
    """One call. `sent` is what a rank sends in it, in bytes, with a ring algorithm, `zeros` how many of these bytes
    belong to elements that are zero, and `squares` the sum of the squares of what a rank contributes to a sum. `of` is
    the index of the call that a wait is for, `peer` the other rank of a send or receive, `among` the ranks of the group
    if it is not that of all ranks, `flops` the operations of a matrix product."""

    op: str
    step: int
    phase: str
    sent: float = 0.0
    zeros: float = 0.0
    squares: float = 0.0
    peer: int | None = None
    among: list[int] | None = None
    of: int | None = None
    flops: int = 0


@dataclass
class Record:
    """One rank. `losses` are by step; `elements` has, by step and phase, the elements that all operators but matrix
    products compute, `operators` how many operators ran, and `syncs` how often the answer got a value of a tensor, for
    which a GPU would have to finish its queue. `memory` holds bytes by moment, once per step that has this moment, of
    torch's tensors, and `process` what the resident set of the process has grown beyond these. `figures` are what else
    a trial measures.

    `error` and `stuck` say where it stopped, `finished_api` which function that is not allowed was called, and
    `forbidden` what else an answer did that it must not do. The examiner adds `expected` (losses), `differences` of the
    results by name, relative to the size of the result, and a `hint`.
    """

    rank: int
    at: float = 0.0
    losses: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    elements: dict[str, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    syncs: dict[str, int] = field(default_factory=dict)
    memory: dict[str, list[float]] = field(default_factory=dict)
    process: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    stuck: str = ""
    finished_api: str = ""
    forbidden: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Record:
        """The record of a dict that `to_json` made."""
        return cls(**fields | {"events": [Event(**event) for event in fields["events"]]})

    def steps(self) -> range:
        """The steps that the trial made."""
        return range(len(self.expected))

    def of_step(self, step: int, *phases: str) -> list[Event]:
        """The events of a step, in order, or those of some of its phases."""
        return [event for event in self.events if event.step == step and (not phases or event.phase in phases)]

    def sent(self, step: int, *phases: str) -> float:
        """Bytes that this rank sends in a step."""
        return sum(event.sent for event in self.of_step(step, *phases))

    def stored(self) -> float:
        """Bytes of keys and values that pass a store, in all steps and outside of them."""
        return sum(event.sent for event in self.events if event.op == STORE)

    def flops(self, step: int, *phases: str) -> int:
        """Operations of the matrix products of a step."""
        return sum(event.flops for event in self.of_step(step, *phases))

    def operations(self, step: int, *phases: str) -> int:
        """Operations of the matrix products of some phases of a step, and the elements of all other operators."""
        return self.flops(step, *phases) + sum(self.elements.get(f"{step} {phase}", 0) for phase in phases)
