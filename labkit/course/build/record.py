"""What one rank records while it runs an answer, and what is expected of it.

The ranks write a `Record` as signed JSON; the examiner checks the signature and adds how far the results are from those
of a single device, by what a trial says in `Expected`. The notebook reads records without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# ---- what a rank records


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

    def other_elements(self, step: int, *phases: str) -> int:
        """The elements that all operators but matrix products compute in some phases of a step."""
        return sum(self.elements.get(f"{step} {phase}", 0) for phase in phases)


# ---- what a single device makes of the inputs that were drawn, and which mistake explains other results


Given = dict[str, Any]  # what one rank is given: tensors by name
Results = dict[str, "Tensor"]  # what one rank ends with, by name
CLOSE = 1e-3  # relative difference below which a mistake explains a result
_NAMED = 3  # results that a hint names


def loaded(model: Any, given: Given, prefix: str = "") -> Any:
    """A model of torch with the parameters that a rank was given, whose names have a prefix there."""
    model.load_state_dict({name: given[f"{prefix}{name}"] for name in model.state_dict()})
    return model


@dataclass
class Expected:
    """Of one rank: its losses by step, its results by name, and the size that a difference of a result is relative to;
    `squares` has, by step, the sum of the squares of what the rank must contribute to sums over the ranks.
    `mistakes` has the results of common mistakes, by words that may contain `{names}`."""

    losses: list[float] = field(default_factory=list)
    tensors: Results = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)
    mistakes: dict[str, Results] = field(default_factory=dict)

    def expects(self, name: str, tensor: Tensor, since: Tensor | None = None) -> None:
        """The rank must end with this tensor; a difference counts relative to its change `since`, or to its norm."""
        self.tensors[name] = tensor.detach().clone()
        self.sizes[name] = _norm(tensor if since is None else tensor - since)

    def expects_parameters(self, tensors: Iterable[tuple[str, Tensor]], start: Results) -> None:
        """The rank must end with these tensors, with their names, as results `parameter …`; they began as `start`."""
        for name, tensor in tensors:
            self.expects(f"parameter {name}", tensor, start[name])

    def mistake(self, words: str, name: str, tensor: Tensor) -> None:
        """With the mistake in `words`, this result would be `tensor`."""
        self.mistakes.setdefault(words, {})[name] = tensor.detach().clone()

    def differences(self, results: Results) -> dict[str, float]:
        """By name, the relative difference of a result; infinite if it has no value or another shape."""
        return {name: self._difference(name, want, results) for name, want in self.tensors.items()}

    def _difference(self, name: str, want: Tensor, results: Results) -> float:
        got = results.get(name)
        if got is None or got.shape != want.shape:
            return float("inf")
        difference = _norm(got - want) / max(self.sizes[name], 1e-12)
        return difference if difference == difference else float("inf")


def hint(expected: list[Expected], results: list[Results]) -> str:
    """The first mistake that explains what is wrong on every rank that has wrong results."""
    for words in dict.fromkeys(words for rank in expected for words in rank.mistakes):
        named: dict[str, None] = {}
        for mine, got in zip(expected, results):
            made = mine.mistakes.get(words, {})
            wrong = [name for name in made if mine._difference(name, mine.tensors[name], got) > CLOSE]
            if any(mine._difference(name, made[name], got) > CLOSE for name in wrong):
                break
            named |= dict.fromkeys(name.rpartition(" ")[2] for name in wrong)
        else:
            if named:
                names = list(named)
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                return words.replace("{names}", ", ".join(names[:_NAMED]) + more)
    return ""


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())
