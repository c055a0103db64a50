"""What one rank records while it runs an answer; the ranks write it as JSON, and the notebook reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit.common.files import write_atomically

COMPUTE, WAIT = "compute", "wait"  # events that are no communication: a matrix product, and the wait for a call
OUTSIDE = -1  # the step of what belongs to no step, or is the trial's own
FORWARD, BACKWARD = "F", "B"  # events of a pipeline: a micro-batch passes a stage
START, END = "start", "end"  # the phases before the first and after the last step


@dataclass
class Event:
    """One call. `sent` is what a rank sends in it, in bytes, with a ring algorithm. `of` is the index of the call that
    a wait is for, `peer` the other rank of a send or receive, `flops` the operations of a matrix product."""

    op: str
    step: int
    phase: str
    sent: float = 0.0
    peer: int | None = None
    of: int | None = None
    flops: int = 0


@dataclass
class Record:
    """One rank. `losses` and `expected` are by step; `memory` holds bytes by moment, once per step that has this
    moment, and `figures` what else a trial measures. `error` and `stuck` say where it stopped, `finished_api` which
    function that is not allowed was called.
    """

    rank: int
    at: float = 0.0
    losses: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    stuck: str = ""
    finished_api: str = ""

    def write(self, folder: Path) -> None:
        """Writes the record of this rank, whole or not at all."""
        write_atomically(folder / f"rank{self.rank}.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> Record | None:
        """The record of a rank; None if it wrote none."""
        try:
            found = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(**found | {"events": [Event(**fields) for fields in found["events"]]})

    def steps(self) -> range:
        """The steps that the trial made."""
        return range(len(self.expected))

    def of_step(self, step: int, *phases: str) -> list[Event]:
        """The events of a step, in order, or those of some of its phases."""
        return [event for event in self.events if event.step == step and (not phases or event.phase in phases)]

    def sent(self, step: int, *phases: str) -> float:
        """Bytes that this rank sends in a step."""
        return sum(event.sent for event in self.of_step(step, *phases))
