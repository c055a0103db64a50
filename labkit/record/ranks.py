"""What is known of each rank, what the supervisor sampled, and what only a comparison of ranks says: which of them read
the same samples, and which failed first.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from labkit.common.units import counted
from labkit.record.documents import Failure, Imported, Status
from labkit.record.events import (
    Batch,
    Between,
    Called,
    Error,
    Input,
    Look,
    MemoryStep,
    Model,
    Restored,
    Seen,
    Silent,
    Timeline,
    Tracked,
    Traffic,
    Waiting,
    Wrapped,
)
from labkit.record.reader import Steps
from labkit.record.stacks import error_in, place

_ENOUGH = 2  # steps that must agree: in a single step, batches may coincide by chance, such as zeros in a warm-up

# Messages of gloo, NCCL and torchrun on a rank whose peer is gone: a consequence, if any other error is known.
PEER_GONE = re.compile(
    r"connection (?:was likely )?(?:closed|reset|refused)|broken pipe|timed out|timeout|remote process exited|peer"
    r" closed|communicator was aborted|got 0 bytes",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # numbers may differ between messages with the same cause

_Seen = TypeVar("_Seen", bound=Seen)


def numbers() -> array[float]:
    """An empty column."""
    return array("d")


@dataclass
class OtherLosses:
    """The losses of an optimizer other than the pacemaker, and the step of the run to which each belongs."""

    step: array[float] = field(default_factory=numbers)
    loss: array[float] = field(default_factory=numbers)


@dataclass
class RankState:
    """The state of one rank. Times are unix seconds; `attempts` maps each attempt to the index of its first step.

    `steady`: the first recorded step is no warm-up.

    `began` is when the process started, `started` when torch was imported, and `startup` when each milestone of
    `startup` events was reached.

    `silent` is what the supervisor reported about a process that could not report itself; it is valid until the rank
    writes again. `left_at` is the stack of the call that ended the script without an error, such as `sys.exit()`; empty
    otherwise.

    If several optimizers train on separate losses, `optimizers` has their names by number. The steps of the run are
    those of the `pacemaker`, and so is the loss in `steps`; `losses` has the losses of the others.
    """

    rank: int
    pid: int | None = None
    host: str | None = None
    device: str = "cpu"
    device_name: str = ""
    attempt: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    steady: bool = False
    began: float | None = None
    started: float | None = None
    startup: dict[str, float] = field(default_factory=dict)
    ended: float | None = None
    exit_code: int | None = None
    left_at: str = ""
    activity: str | None = None
    error: Error | None = None
    owners: dict[str, int] = field(default_factory=dict)
    traffic: Traffic | None = None
    timelines: dict[int, Timeline] = field(default_factory=dict)
    memory_step: MemoryStep | None = None
    waiting: Waiting | None = None
    called: Called | None = None
    silent: Silent | None = None
    not_finite: int | None = None
    saw: list[Seen] = field(default_factory=list)
    tracked: Tracked | None = None
    looks: list[Look] = field(default_factory=list)
    between: list[Between] = field(default_factory=list)
    wrapped: list[Wrapped] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    losses: dict[int, OtherLosses] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    pacemaker: int | None = None

    @property
    def timeline(self) -> Timeline | None:
        """The `timeline` event of the newest profiled step; None if there is none."""
        return self.timelines[max(self.timelines)] if self.timelines else None

    def seen(self, what: type[_Seen]) -> list[_Seen]:
        return [seen for seen in self.saw if isinstance(seen, what)]

    @property
    def models(self) -> list[Model]:
        """The models that train, in the order of their first call; loss modules, which older versions recorded, are
        left out.
        """
        return [model for model in self.seen(Model) if model.parameters]

    @property
    def pacemaker_name(self) -> str | None:
        """The name of the optimizer that sets the pace; None if there is only one."""
        return None if self.pacemaker is None else self.optimizers.get(self.pacemaker)

    @property
    def first_step(self) -> int:
        """The index of the first step of the newest attempt, recorded or not."""
        return self.attempts.get(self.attempt, 0)

    @property
    def steps_done(self) -> int:
        """The number of the last step that was finished in the newest attempt."""
        return int(self.steps.step[-1]) if len(self.steps) > self.first_step else 0

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that the rank sent in the newest measured step; 0 without a process group, None if unknown."""
        return None if self.traffic is None else float(sum(op.sent for op in self.traffic.ops.values()))

    @property
    def peak_memory(self) -> int | None:
        """The largest peak of any step, in bytes; without steps, that of the profiled memory; None if unknown."""
        if self.steps.peak is None and not len(self.steps) and self.memory_step is not None:
            return int(self.memory_step.peak)
        return self.steps.peak


@dataclass
class System:
    """Samples taken by the supervisor: times `t`, and columns by device index or rank."""

    t: array[float] = field(default_factory=numbers)
    cpu_percent: array[float] = field(default_factory=numbers)
    memory_used: array[float] = field(default_factory=numbers)
    gpus: dict[int, dict[str, array[float]]] = field(default_factory=dict)
    gpu_memory_total: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, dict[str, array[float]]] = field(default_factory=dict)


# ---- which ranks read the same samples


def inferred(ranks: Mapping[int, RankState]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """For a script that is not the lab's: groups of two or more ranks that read the same samples, and later pipeline
    stages.
    """
    inputs = {number: _digests(rank, Input) for number, rank in sorted(ranks.items())}
    later = tuple(number for number, seen in inputs.items() if seen and not any(seen.values()))
    first = {number: seen for number, seen in inputs.items() if number not in later and any(seen.values())}
    if not first:
        return [], ()  # no rank reads samples visibly, so activations do not identify the stages
    steps = set.intersection(*(set(seen) for seen in first.values()))
    if len(steps) < _ENOUGH:
        return [], later
    groups: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for number, seen in first.items():
        groups[tuple(seen[step] for step in sorted(steps))].append(number)
    return [part for numbers in groups.values() for part in _by_batches(ranks, numbers) if len(part) > 1], later


def inferred_note(ranks: Mapping[int, RankState]) -> str:
    """The inference in words; empty if every rank reads different samples."""
    same, later = inferred(ranks)
    parts = [f"{_named(numbers)} read the same samples, so each sample counts once" for numbers in same]
    if later:
        parts.append(
            f"{_named(later)} {'receive' if len(later) > 1 else 'receives'} activations, so no samples count there"
        )
    return f"samples/s inferred from the first batches: {'; '.join(parts)}" if parts else ""


# ---- steps of ranks that differ


def finished_steps(ranks: Mapping[int, RankState]) -> dict[int, int]:
    """By rank, the steps that it has finished in its newest attempt."""
    return {number: rank.steps_done for number, rank in ranks.items()}


def uneven_note(ranks: Mapping[int, RankState]) -> str:
    """How many steps each rank has finished, in words; empty if all have finished as many."""
    alike: dict[int, list[int]] = defaultdict(list)
    for number, steps in finished_steps(ranks).items():
        alike[steps].append(number)
    if len(alike) < 2:
        return ""
    parts = [f"{_named(tuple(numbers))} finished {counted(steps, 'step')}" for steps, numbers in sorted(alike.items())]
    return f"Ranks differ in their steps: {', '.join(parts)}."


def repeated_note(ranks: Mapping[int, RankState]) -> str:
    """After which step ranks went back to an earlier state, in words; empty if none did."""
    steps = [restored.step for rank in ranks.values() for restored in rank.seen(Restored)]
    if not steps:
        return ""
    return f"The script loaded an optimizer's state after step {min(steps)}: steps that it repeats count again."


def _named(ranks: tuple[int, ...]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _by_batches(ranks: Mapping[int, RankState], numbers: list[int]) -> list[tuple[int, ...]]:
    """Splits ranks with the same model inputs by the batches of their loaders; a rank without a loader receives its
    batches.
    """
    batches = {number: _digests(ranks[number], Batch) for number in numbers}
    steps = set.intersection(*(set(seen) for seen in batches.values() if seen)) if any(batches.values()) else set()
    parts: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for number in (number for number in numbers if batches[number]):
        parts[tuple(batches[number][step] for step in sorted(steps))].append(number)
    given = [number for number in numbers if not batches[number]]
    if len(parts) > 1:
        return [tuple(part) for part in parts.values()]
    return [tuple(sorted([*next(iter(parts.values()), []), *given]))]


def _digests(rank: RankState, what: type[Input] | type[Batch]) -> dict[int, str | None]:
    return {seen.step: seen.digest for seen in rank.saw if isinstance(seen, what)}


# ---- runs that were not launched here


def imported_note(imported: Imported) -> str:
    """What an imported run was made from, in words."""
    return (
        f"Made from {counted(len(imported.sources), 'file')} of a job that ran elsewhere: {'; '.join(imported.titles)}."
        " A figure that these files do not have is shown as unknown."
    )


# ---- which ranks failed first


@dataclass
class _Report:
    """One rank's failure at time `t`. `consequence`: it only reports a lost peer."""

    rank: int
    t: float
    type: str
    message: str
    traceback: str
    exit_code: int | None
    consequence: bool
    last_seen: bool = False


def failure_of(ranks: Mapping[int, RankState], status: Status, over: bool) -> Failure | None:
    """The first failure of a run; None if no rank failed.

    `rank`, `type`, `message`, `traceback` (a stack, innermost frame last) and `exit_code` are those of the first rank
    in time. An error that only reports a lost peer never outranks the peer itself: a rank killed by a signal leaves no
    error event, only the errors of its peers. `alike` are all ranks that failed in the same way, including the first:
    same type, same message except for numbers, same line. `collateral` are the other ranks that ended because of it;
    once the run is over, these include ranks that did not report how they ended. `left` are ranks that had exited with
    code 0, if the first failure reports a lost peer. `last_seen` is true if `traceback` was sampled shortly before the
    process died and is not the stack of the failure itself.
    """
    failures = [*_reported_by_ranks(ranks, status), *_reported_by_torchrun(ranks, status)]
    if not failures:
        return None
    first = min(failures, key=lambda failure: (failure.consequence, failure.t))
    alike = sorted(failure.rank for failure in failures if failure is first or _same_way(first, failure))
    left = sorted(rank.rank for rank in ranks.values() if rank.exit_code == 0) if first.consequence else []
    others = {failure.rank for failure in failures}
    if over:
        others |= {rank.rank for rank in ranks.values() if rank.exit_code is None}
    return Failure(
        rank=first.rank,
        type=first.type,
        message=first.message,
        traceback=first.traceback,
        exit_code=first.exit_code,
        last_seen=first.last_seen,
        alike=alike,
        collateral=sorted(others - set(alike)),
        left=left,
    )


def exit_code(ranks: Mapping[int, RankState], status: Status, number: int) -> int | None:
    """A rank's exit code, from its own last event or from torchrun's report; None if it was terminated with its
    group."""
    rank = ranks.get(number)
    if rank is not None and rank.exit_code is not None:
        return rank.exit_code
    report = (status.failures or {}).get(number)
    reported = report.exit_code if report else None
    return 1 if reported is None and rank is not None and rank.error else reported


def _reported_by_ranks(ranks: Mapping[int, RankState], status: Status) -> Iterator[_Report]:
    for rank in ranks.values():
        if error := rank.error:
            consequence = bool(PEER_GONE.search(f"{error.type} {error.message}"))
            code = exit_code(ranks, status, rank.rank)
            yield _Report(rank.rank, error.t, error.type, error.message, error.traceback, code, consequence)


def _reported_by_torchrun(ranks: Mapping[int, RankState], status: Status) -> Iterator[_Report]:
    for rank, failed in (status.failures or {}).items():
        if not failed.exit_code or (rank in ranks and ranks[rank].error):
            continue
        kind, message = failed.signal or f"exit code {failed.exit_code}", failed.message
        if not failed.signal:
            kind, message = error_in(message) or (kind, message)  # the last line of a traceback in its log
        yield _Report(
            rank=rank,
            t=math.inf if failed.t is None else failed.t,
            type=kind,
            message=message,
            traceback=failed.traceback,
            exit_code=failed.exit_code,
            consequence=failed.signal == "SIGTERM",
            last_seen=failed.last_seen,
        )


def _same_way(one: _Report, other: _Report) -> bool:
    """Whether two ranks failed in the same way. A rank known only from torchrun's report has no line to compare."""
    if one.type != other.type or _NUMBERS.sub("#", one.message) != _NUMBERS.sub("#", other.message):
        return False
    lines = {place(failure.traceback) for failure in (one, other) if failure.traceback and not failure.last_seen}
    return len(lines) < 2
