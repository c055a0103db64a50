"""What is exported: the one table of figures, with their names and units, and the rows of a run that hold them.

Every tool gets the same names. A tool of named series (a tracker) gets one for each rank, `loss/rank0`, and one for all
ranks, `loss/mean`; a tool of tables gets the columns `rank` and `loss`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy

from labkit.analysis.metrics import step_throughput, step_times
from labkit.analysis.profiled import overlap
from labkit.analysis.summary import summarise
from labkit.record.documents import Summary, plain
from labkit.record.events import Event, Memory, Metric, Timeline, Traffic
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.ranks import RankState
from labkit.record.reader import Block, Column
from labkit.record.state import RunState
from labkit.record.writer import OWNERS, PHASES

LOGGED = "logged"  # the prefix of values that the script logged
SUMMARY = "summary"  # the prefix of figures of the whole run
_PIECE = 4096  # steps of a rank that are read at once
_LONGEST = 100  # characters of the name of a value that the script logged
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_ .-]")  # allowed in the names of all tools, but for the slash


@dataclass(frozen=True)
class Figure:
    """A figure under its exported `name`: its `unit` (empty for a pure number), and `of`, which reads it. `together` is
    how the ranks are combined into one more value; empty if they are not. What each means is in the reference."""

    name: str
    unit: str
    of: Callable[..., Any]
    together: str = ""


def _phase(phase: str) -> Callable[[RankState, slice], numpy.ndarray]:
    return lambda rank, part: step_times(rank, part, phase)


def _memory(name: str) -> Callable[[RankState, slice], numpy.ndarray]:
    return lambda rank, part: rank.steps.memory[name][part]


# Of each step of each rank: `of` takes the rank and a slice of its steps, and returns a value per step, NaN if unknown.
STEPS = (
    Figure("loss", "", lambda rank, part: rank.steps.loss[part], together="mean"),
    Figure("samples", "samples", lambda rank, part: rank.steps.samples[part]),
    Figure("samples_per_second", "samples/s", step_throughput, "total"),
    Figure("step_seconds", "s", step_times),
    *(Figure(f"{phase}_seconds", "s", _phase(phase)) for phase in PHASES),
    Figure("memory_allocated_bytes", "bytes", _memory("allocated")),
    Figure("memory_reserved_bytes", "bytes", _memory("reserved")),
    Figure("memory_peak_bytes", "bytes", _memory("peak")),
)


def _of_owner(owner: str) -> Callable[[Memory], float | None]:
    return lambda event: event.owners.get(owner)


# Of some steps of each rank: the kind of event, and figures whose `of` takes the event; None if it does not have them.
MEASURED: dict[type, tuple[Figure, ...]] = {
    Memory: tuple(Figure(f"memory_{owner}_bytes", "bytes", _of_owner(owner)) for owner in OWNERS),
    Traffic: (Figure("sent_bytes", "bytes", lambda event: sum(operation.sent for operation in event.ops.values())),),
    Timeline: (
        Figure("communication_seconds", "s", lambda event: None if event.calls_only else overlap(event)[0]),
        Figure("exposed_communication_seconds", "s", lambda event: None if event.calls_only else overlap(event)[1]),
    ),
}

# Of the whole run: `of` takes the summary.
OF_RUN = (
    Figure("steps", "steps", lambda summary: summary.steps),
    Figure("loss", "", lambda summary: summary.loss),
    Figure("accuracy", "", lambda summary: summary.accuracy),
    Figure("samples_per_second", "samples/s", lambda summary: summary.samples_per_second),
    Figure("tokens_per_second", "tokens/s", lambda summary: summary.tokens_per_second),
    Figure("flops_per_device", "FLOP/s", lambda summary: summary.flops_per_device),
    Figure("mfu", "", lambda summary: summary.mfu),
    Figure("total_seconds", "s", lambda summary: summary.seconds.total),
    Figure("first_step_seconds", "s", lambda summary: summary.seconds.to_first_step),
    Figure("restarts", "restarts", lambda summary: summary.restarts),
)

# Of each rank over the whole run: `of` takes the rank's figures in the summary.
OF_RANK = (
    Figure("step_seconds_median", "s", lambda rank: rank.step_seconds_median),
    Figure("step_seconds_p95", "s", lambda rank: rank.step_seconds_p95),
    *(
        Figure(f"{phase}_seconds_median", "s", lambda rank, phase=phase: rank.phase_seconds.get(phase))
        for phase in PHASES
    ),
    Figure("memory_peak_bytes", "bytes", lambda rank: rank.peak_memory_bytes),
    Figure("sent_bytes", "bytes", lambda rank: rank.comm_bytes_per_step),
    Figure("overlapped_communication", "", lambda rank: rank.communication and rank.communication.hidden),
)


def series(name: str, rank: int | None, together: str = "run") -> str:
    """The name of a figure's series in a tracker: `loss/rank0`, `loss/mean`."""
    return f"{name}/{together if rank is None else f'rank{rank}'}"


def plain_name(logged: str | None) -> str:
    """The name of a value that the script logged, without what a tool does not allow in names."""
    return _NOT_IN_NAMES.sub("_", logged or "")[:_LONGEST].strip(". ") or "_"


TOGETHER = {figure.name: figure.together for figure in STEPS if figure.together}


# ---- the rows of a run


@dataclass(frozen=True)
class Row:
    """Values of one step, by name: of one rank, or of all ranks (`rank` None). `t` is in Unix seconds, `attempt` counts
    restarts. `is_step`: the figures that every step has; otherwise what was measured in, or logged at, this step."""

    t: float
    attempt: int
    step: int
    rank: int | None
    values: dict[str, float]
    is_step: bool = True

    @property
    def series(self) -> dict[str, float]:
        """The values by the names of their series in a tracker."""
        return {series(name, self.rank, TOGETHER.get(name, "run")): value for name, value in self.values.items()}


@dataclass(frozen=True)
class End:
    """What is known when an export ends: the state of the run, its figures as (name, rank or None, value, unit), and
    its summary, with the findings."""

    state: RunState
    summary: Summary
    figures: list[tuple[str, int | None, float, str]] = field(default_factory=list)

    @property
    def notes(self) -> str:
        """Findings, the failure and the lab's remark, as Markdown."""
        parts = [f"{self.summary.run}: {self.state.words}", self.summary.note]
        for finding in self.summary.findings:
            parts.append(
                f"**{finding.title}**\n\n- Evidence: {finding.evidence}\n- Cause: {finding.cause}\n- Fix: {finding.fix}"
            )
        return "\n\n".join(filter(None, parts))


class Rows:
    """The rows of a run folder: `take` gives those that are new since the last call. `progress` is that of
    `Follower`."""

    def __init__(self, folder: RunFolder, progress: Callable[[float], None] = lambda share: None):
        self._folder = folder
        self._heard: list[Row] = []
        self._follower = Follower(folder, progress, self._hear)
        self._taken: dict[int, int] = {}  # by rank, how many of its steps
        self._combined: dict[int, int] = {}  # by attempt, how many steps of all ranks

    @property
    def state(self) -> RunState:
        """The state of the run at the last call of `take`."""
        return self._follower.state

    def config(self) -> dict[str, str | int | float | bool]:
        """The Spec as flat hyperparameters: the fields that are set, and the options as `options.NAME`."""
        fields = plain(self._folder.read_spec())
        options = {f"options.{name}": value for name, value in fields.pop("options", {}).items()}
        fields["args"] = " ".join(fields.pop("args", [])) or None
        return {name: value for name, value in (fields | options).items() if value is not None}

    def take(self) -> Iterator[Row]:
        """The new rows: of each rank in the order of its steps, then those of all ranks together, then what some steps
        have."""
        self._follower.poll()
        for rank in self.state.ranks.values():
            yield from self._steps_of(rank)
        yield from self._of_all_ranks()
        heard, self._heard = self._heard, []
        yield from heard

    def end(self) -> End:
        """What is known at the end, or now."""
        summary = summarise(self.state, self._folder.name)
        figures = [(figure, None, figure.of(summary)) for figure in OF_RUN]
        for rank in summary.ranks:
            figures += [(figure, rank.rank, figure.of(rank)) for figure in OF_RANK]
        known = [
            (figure.name, rank, float(value), figure.unit)
            for figure, rank, value in figures
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        return End(self.state, summary, known)

    def _hear(self, event: Event | Block) -> None:
        """Notes what is not in the columns of steps."""
        if isinstance(event, Metric):
            if isinstance(event.value, (int, float)) and not isinstance(event.value, bool):
                self._note(event, event.rank, {f"{LOGGED}/{plain_name(event.name)}": float(event.value)})
            return
        values = {figure.name: figure.of(event) for figure in MEASURED.get(type(event), ())}
        known = {name: float(value) for name, value in values.items() if value is not None}
        if known:
            self._note(event, event.rank, known)  # type: ignore[union-attr]

    def _note(self, event: Any, rank: int | None, values: dict[str, float]) -> None:
        attempt = self.state.ranks[rank].attempt if rank in self.state.ranks else 0
        self._heard.append(Row(event.t, attempt, int(event.step or 0), rank, values, is_step=False))

    def _steps_of(self, rank: RankState) -> Iterator[Row]:
        for attempt, (first, last) in _spans(rank).items():
            for begin in range(max(first, self._taken.get(rank.rank, 0)), last, _PIECE):
                part = slice(begin, min(last, begin + _PIECE))
                times, steps = rank.steps.t[part], rank.steps.step[part]
                for index, values in enumerate(_values(rank, part)):
                    yield Row(float(times[index]), attempt, int(steps[index]), rank.rank, values)
        self._taken[rank.rank] = len(rank.steps)

    def _of_all_ranks(self) -> Iterator[Row]:
        """Means and totals of the steps that all ranks have finished; of a run that is over, of the ranks that made
        steps."""
        state, spans = self.state, {number: _spans(rank) for number, rank in self.state.ranks.items()}
        weights = state.sample_weights()
        for attempt in sorted({attempt for of_rank in spans.values() for attempt in of_rank}):
            there = {
                number: of_rank[attempt]
                for number, of_rank in spans.items()
                if attempt in of_rank and of_rank[attempt][1] > of_rank[attempt][0]
            }
            if not there or (len(there) < state.expected and not state.over):
                continue
            begin = self._combined.get(attempt, 0)
            end = min(last - first for first, last in there.values())
            for piece in range(begin, end, _PIECE):
                yield from self._combine(attempt, there, range(piece, min(end, piece + _PIECE)), weights)
            self._combined[attempt] = max(begin, end)

    def _combine(
        self, attempt: int, there: dict[int, tuple[int, int]], steps: range, weights: dict[int, float]
    ) -> Iterator[Row]:
        columns = {}
        for number, (first, _) in there.items():
            part = slice(first + steps.start, first + steps.stop)
            columns[number] = list(_values(self.state.ranks[number], part))
        lead = min(there)
        part = slice(there[lead][0] + steps.start, there[lead][0] + steps.stop)
        times, numbers = self.state.ranks[lead].steps.t[part], self.state.ranks[lead].steps.step[part]
        for index in range(len(steps)):
            of_ranks = {number: rows[index] for number, rows in columns.items()}
            losses = [values["loss"] for values in of_ranks.values() if "loss" in values]
            speeds = [
                weights[number] * values["samples_per_second"]
                for number, values in of_ranks.items()
                if "samples_per_second" in values
            ]
            values = ({"loss": sum(losses) / len(losses)} if losses else {}) | (
                {"samples_per_second": sum(speeds)} if speeds else {}
            )
            if values:
                yield Row(float(times[index]), attempt, int(numbers[index]), None, values)


def _spans(rank: RankState) -> dict[int, tuple[int, int]]:
    """By attempt, the indices of a rank's steps: the first, and the one after the last."""
    starts = list(rank.attempts.items()) or [(0, 0)]
    ends = [first for _, first in starts[1:]] + [len(rank.steps)]
    return {attempt: (first, end) for (attempt, first), end in zip(starts, ends)}


def _values(rank: RankState, part: slice) -> Iterator[dict[str, float]]:
    """The figures of each of some steps of a rank that are known; a loss that is NaN because the training diverged
    is."""
    columns = {figure.name: numpy.asarray(figure.of(rank, part), float) for figure in STEPS}
    known = {name: ~numpy.isnan(column) for name, column in columns.items()}
    known["loss"] = Column(rank.steps, "losses")[part] > 0
    for index in range(part.stop - part.start):
        yield {name: float(column[index]) for name, column in columns.items() if known[name][index]}
