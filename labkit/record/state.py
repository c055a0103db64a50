"""RunState: the fold of a run's events, and what it says: progress, words, failure. Live charts, terminal, replay,
summary and tests all read the same state. At the end stand the milestones of its start, in seconds after its request.

`apply` takes one event at a time, in any order between ranks: what readers return, and the documents of the folder, so
a replayed run is handled like a live one. All of them are trusted, because decoding has checked them.

The state knows no clock. The present of a run is its newest recorded time (`now`), which the supervisor's samples move
forward, several times per second, while the ranks write nothing. A value derived from a state therefore depends on its
events alone, and is valid for as long as `revision` does not change.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, get_args, get_type_hints

from msgspec.structs import replace

from labkit.common.units import ranks_in_words
from labkit.plan.spec import Spec, SpecError
from labkit.record import events
from labkit.record.documents import Failure, Guessed, Guesses, Imported, Plan, SpecFields, Status
from labkit.record.events import Recorded, Value
from labkit.record.ranks import (
    OtherLosses,
    RankState,
    System,
    exit_code,
    failure_of,
    finished_steps,
    imported_note,
    inferred,
    inferred_note,
    numbers,
    repeated_note,
    uneven_note,
)
from labkit.record.reader import Block, number
from labkit.record.stacks import MESSAGE_LIMIT, TEXT_LIMIT, clipped
from labkit.record.writer import OWNERS, STARTUP

OVER = ("finished", "failed", "stopped", "lost", "imported")
Applied: TypeAlias = events.Event | Block | SpecFields | Status | Plan | Guesses | Imported

_TRAINS = ("training", "evaluating")  # any other activity of a rank is a preparation, in words
_TIMELINES = 20  # stored per rank
_SEEN = 200
_LOOKS = 48  # stored per rank: the first ones, and the newest
_METRICS = 1000  # stored metrics, the newest
_NAMES = 1000  # names of metrics and reported values that are stored
_REPLICA_STEPS = 50  # newest steps of which the figures of dp's replicas are stored

_Derived = TypeVar("_Derived")
_Arguments = ParamSpec("_Arguments")


def per_revision(
    compute: Callable[Concatenate[RunState, _Arguments], _Derived],
) -> Callable[Concatenate[RunState, _Arguments], _Derived]:
    """Computes `compute(state, …)` once per revision of the state and set of arguments, which must be hashable.

    All views share the returned object, so none of them may change it. It is stored in the state and lives as long.
    """

    @functools.wraps(compute)
    def known(state: RunState, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Derived:
        revision, key = state.revision, (compute, args, tuple(kwargs.items()))
        derived = state.derived.get(key)
        if derived is None or derived[0] != revision:
            derived = state.derived[key] = revision, compute(state, *args, **kwargs)
        return derived[1]

    return known


def elapsed(start: float | None, end: float | None) -> float | None:
    """Seconds between two times of a run; None if one is unknown, or if they are reversed (older versions had no steady
    clock).
    """
    return end - start if start and end and end >= start else None


class RunState:
    """The state of a run: its Spec, status and prediction, ranks, metrics, reports and samples. `guess` has what the
    learner predicted, by figure; `imported` is where a run comes from that was not launched here; `queue` the state of
    the scheduler's job; `ras` the newest answer of NCCL's RAS service; `unreported` why the status of a TrainJob did
    not arrive; `nodes` when nodes met and were cut off; `broken` counts unusable lines.
    """

    def __init__(self) -> None:
        self.spec = SpecFields()
        self.status = Status("ready")
        self.prediction: Plan | None = None
        self.guess: dict[str, Guessed] = {}
        self.imported: Imported | None = None
        self.ranks: dict[int, RankState] = {}
        self.metrics: deque[events.Metric] = deque(maxlen=_METRICS)
        self.reports: dict[int, dict[str, Value]] = {}
        self.system = System()
        self.queue: events.Queue | None = None
        self.ras: events.Ras | None = None
        self.unreported = ""
        self.nodes: deque[events.Hosts | events.CutOff] = deque(maxlen=_SEEN)
        self.broken = 0
        self.unwatched: list[events.ProbeError] = []
        self.dropped: dict[int, int] = {}
        self.in_threads: deque[events.Replica] = deque(maxlen=_REPLICA_STEPS)
        self.derived: dict[Any, tuple[int, Any]] = {}  # cache of `per_revision`: revision and value
        self._asked: Spec | None = None
        self._newest_metrics: dict[str | None, Value] = {}
        self._applied = 0

    @property
    def revision(self) -> int:
        """The number of changes so far: it grows whenever the state changes, and with nothing else."""
        return self._applied + self.broken

    # ---- the fold

    def apply(self, event: Applied) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            try:
                handler(self, event)
            finally:  # counted last: what another thread derived from half of a change is derived again
                self._applied += 1

    def _rank(self, event: events.OfRank | events.GoingOn | Block) -> RankState:
        if event.rank not in self.ranks:  # in order, whichever file is read first
            self.ranks = dict(sorted({**self.ranks, event.rank: RankState(event.rank)}.items()))
        return self.ranks[event.rank]

    def _on_spec(self, fields: SpecFields) -> None:
        self.spec = fields
        try:
            spec = fields.to_spec()
        except SpecError:
            spec = None  # of a newer version: the run is still shown, but its totals are unknown
        self._asked = spec if spec and spec.strategy and spec.nproc else None

    def _on_guess(self, guesses: Guesses) -> None:
        self.guess = guesses.figures

    def _on_imported(self, imported: Imported) -> None:
        self.imported = imported

    def _on_prediction(self, plan: Plan) -> None:
        self.prediction = plan

    def _on_status(self, status: Status) -> None:
        failures = {rank: _with_short_texts(failed) for rank, failed in (status.failures or {}).items()}
        self.status = replace(_with_short_texts(status), failures=failures)

    def _on_start(self, event: events.Start) -> None:
        rank = self._rank(event)
        rank.pid, rank.host, rank.device, rank.device_name = event.pid, event.host, event.device, event.device_name
        rank.attempt, rank.steady = event.attempt, event.steady
        rank.attempts.pop(rank.attempt, None)  # in the order of their first steps, whatever their numbers are
        rank.attempts[rank.attempt] = len(rank.steps)
        rank.started, rank.ended, rank.exit_code, rank.error, rank.activity = event.t, None, None, None, None
        rank.called = None
        rank.waiting, rank.not_finite, rank.saw, rank.timelines, rank.left_at = None, None, [], {}, ""
        rank.tracked, rank.looks, rank.between, rank.wrapped = None, [], [], []
        rank.began, rank.startup = event.began, {}

    def _on_startup(self, event: events.Startup) -> None:
        startup = self._rank(event).startup
        if event.name in STARTUP:
            startup.setdefault(event.name, event.t)

    def _on_device(self, event: events.Device) -> None:
        rank = self._rank(event)
        rank.device, rank.device_name = event.device, event.device_name

    def _on_step(self, event: events.Step) -> None:
        rank = self._rank(event)
        rank.steps.append(event)
        rank.waiting = None
        if rank.not_finite is None and not math.isfinite(event.loss or 0.0):
            rank.not_finite = event.step

    def _on_steps(self, block: Block) -> None:
        rank = self._rank(block)
        before = len(rank.steps)
        broken, diverged = rank.steps.extend(block)
        self.broken += broken
        if len(rank.steps) > before:
            rank.waiting = None
        rank.not_finite = diverged if rank.not_finite is None else rank.not_finite

    def _on_optimizer(self, event: events.Optimizer) -> None:
        rank, which = self._rank(event), event.optimizer
        rank.optimizers[which] = event.name or f"optimizer {which + 1}"
        if event.sets_pace:
            rank.pacemaker = which

    def _on_losses(self, event: events.Losses) -> None:
        losses = self._rank(event).losses.setdefault(event.optimizer, OtherLosses())
        for step, loss in event.points:
            losses.step.append(step)
            losses.loss.append(number(loss))

    def _on_memory(self, event: events.Memory) -> None:
        self._rank(event).owners = {owner: int(size) for owner, size in event.owners.items()}

    def _on_replica(self, event: events.Replica) -> None:
        self.in_threads.append(event)

    def _on_traffic(self, event: events.Traffic) -> None:
        self._rank(event).traffic = event

    def _on_timeline(self, event: events.Timeline) -> None:
        timelines = self._rank(event).timelines
        timelines[event.step] = event
        while len(timelines) > _TIMELINES:
            del timelines[min(timelines)]

    def _on_memory_step(self, event: events.MemoryStep) -> None:
        sizes = {owner: event.owners[owner] for owner in OWNERS if owner in event.owners}
        self._rank(event).memory_step = replace(event, owners=sizes)

    def _on_waiting(self, event: events.Waiting) -> None:
        self._rank(event).waiting = _with_short_texts(event)

    def _on_called(self, event: events.Called) -> None:
        self._rank(event).called = _with_short_texts(event)

    def _on_going_on(self, event: events.GoingOn) -> None:
        self._rank(event).waiting = None

    def _on_silent(self, event: events.Silent) -> None:
        self._rank(event).silent = _with_short_texts(event)

    def _on_heard(self, event: events.Heard) -> None:
        self._rank(event).silent = None

    def _on_ras(self, event: events.Ras) -> None:
        self.ras = event

    def _on_saw(self, event: events.Seen) -> None:
        saw = self._rank(event).saw
        if len(saw) < _SEEN:
            saw.append(event)

    def _on_tracked(self, event: events.Tracked) -> None:
        rank = self._rank(event)
        if rank.tracked is None or rank.tracked.tensors != event.tensors:
            rank.looks, rank.between = [], []
        rank.tracked = event

    def _on_look(self, event: events.Look) -> None:
        looks = self._rank(event).looks
        looks.append(event)
        if len(looks) > _LOOKS:
            del looks[_LOOKS // 2]

    def _on_between(self, event: events.Between) -> None:
        between = self._rank(event).between
        if len(between) < _LOOKS:
            between.append(event)

    def _on_wrapped(self, event: events.Wrapped) -> None:
        wrapped = self._rank(event).wrapped
        if len(wrapped) < _LOOKS:
            wrapped.append(event)

    def _on_activity(self, event: events.Activity) -> None:
        self._rank(event).activity = event.name

    def _on_metric(self, event: events.Metric) -> None:
        self.metrics.append(event)
        if event.name in self._newest_metrics or len(self._newest_metrics) < _NAMES:
            self._newest_metrics[event.name] = event.value

    def _on_report(self, event: events.Report) -> None:
        reported = self.reports.setdefault(self._rank(event).rank, {})
        for name, value in event.values.items():
            if name in reported or len(reported) < _NAMES:
                reported[name] = value

    def _on_error(self, event: events.Error) -> None:
        self._rank(event).error = replace(_with_short_texts(event), type=clipped(event.type or "Exception"))

    def _on_probe_error(self, event: events.ProbeError) -> None:
        self._rank(event)
        if len(self.unwatched) < _SEEN:
            self.unwatched.append(_with_short_texts(event))

    def _on_dropped(self, event: events.Dropped) -> None:
        rank = self._rank(event).rank
        self.dropped[rank] = self.dropped.get(rank, 0) + event.events

    def _on_nodes(self, event: events.Hosts | events.CutOff) -> None:
        self.nodes.append(event)

    def _on_queue(self, event: events.Queue) -> None:
        self.queue = event

    def _on_unreported(self, event: events.Unreported) -> None:
        self.unreported = clipped(event.reason)

    def _on_end(self, event: events.End) -> None:
        rank = self._rank(event)
        rank.ended, rank.exit_code, rank.left_at = event.t, event.exit_code, clipped(event.stack)

    def _on_system(self, event: events.System) -> None:
        system = self.system
        system.t.append(event.t)
        system.cpu_percent.append(number(event.cpu_percent))
        system.memory_used.append(number(event.memory_used))
        for gpu in event.gpus or []:
            _sample(system.gpus.setdefault(gpu.index, {}), event.t, gpu, ("memory_used", "utilisation", "power"))
            system.gpu_memory_total[gpu.index] = int(gpu.memory_total or 0)
        for rank, process in (event.ranks or {}).items():
            _sample(system.ranks.setdefault(rank, {}), event.t, process, ("cpu_percent", "rss"))

    # ---- the Spec, and the progress

    @property
    def asked(self) -> Spec | None:
        """The Spec of a run of a strategy; None for any other script, and for a Spec of a newer version."""
        return self._asked

    @property
    def world_size(self) -> int:
        """The number of ranks (processes), as requested or as observed; it changes when nodes join or leave."""
        if met := self.met:
            return len(met[-1].hosts)
        return self._asked.processes if self._asked else self.spec.nproc or max(len(self.ranks), 1)

    @property
    def met(self) -> list[events.Hosts]:
        """When the ranks of several nodes met, in order, each time with the host of every rank."""
        return sorted((event for event in self.nodes if isinstance(event, events.Hosts)), key=lambda event: event.t)

    @property
    def expected(self) -> int:
        """The number of ranks whose events are in this folder: all, those of one node, or none of a TrainJob."""
        return self.world_size if self.status.ranks_here is None else self.status.ranks_here

    @property
    def listed_ranks(self) -> list[int]:
        """The ranks that tables have a row for: all; of an imported run those of which there are files."""
        return sorted(self.ranks) if self.imported and self.ranks else [*range(self.world_size)]

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole run; None if only the script knows it."""
        return self._asked.total_steps if self._asked else None

    @property
    def step(self) -> int:
        """The number of steps that all ranks of this folder have finished in the newest attempt. Of a script of the
        user's own, ranks without a step do not count: they may serve the ones that train."""
        world = self.world_size
        ranks = {number: rank for number, rank in self.ranks.items() if number < world}  # others have left
        done = finished_steps(ranks).values()
        if len(done) != self.expected:
            return 0
        return min((steps for steps in done if steps or self._asked), default=0)

    @property
    def note(self) -> str:
        """Remarks: how the run differs from the strategy's title (such as emulation), how a script's samples and steps
        are counted, and why the run started cold. Empty if there are none.
        """
        if self.imported:
            notes = [imported_note(self.imported)]
        elif self._asked:
            notes = [self._asked.strategy_row.note(self._asked.device)]
        else:
            notes = [inferred_note(self.ranks), repeated_note(self.ranks)]
            notes += [uneven_note(self.ranks)] if self.over else []
        because = self.status.cold_because
        notes.append(f"The run started cold: {because}." if because else "")
        return " ".join(filter(None, notes))

    @property
    def over(self) -> bool:
        """Whether the run has ended, in any state."""
        return self.status.state in OVER

    @property
    def words(self) -> str:
        """The state in words: ready, starting ranks, building an extension, training, …, finished, failed (…), lost
        (…), imported, not launched here."""
        state = self.status.state
        if self.imported or state == "imported":
            return "imported, not launched here"
        if state == "failed":
            return f"failed ({self._failure_words})"
        if state == "lost":
            return f"lost ({self.status.message})"
        if self.queue is not None and self.queue.state not in ("RUNNING", "COMPLETING") and not self.over:
            reason = f": {self.queue.reason}" if self.queue.reason else ""
            return f"job {self.queue.job} of {self.queue.scheduler} is {self.queue.state.lower()}{reason}"
        if state == "starting" and self.status.waiting:
            return self.status.waiting
        if state != "running":
            return "starting ranks" if state == "starting" else state
        activities = {rank.activity for rank in self.ranks.values()}
        if len(self.ranks) < self.expected or activities <= {None}:
            return "starting ranks"
        preparing = sorted(activity for activity in activities if activity is not None and activity not in _TRAINS)
        if preparing:
            return preparing[0]
        return "evaluating" if activities == {"evaluating"} else "training"

    @property
    def _failure_words(self) -> str:
        failure = self.failure
        if failure is None:
            return self.status.message or "the ranks reported no reason"
        message = " ".join(failure.message.split())  # on one line
        says = failure.type + (f": {message}" if message else "")
        left = f"{ranks_in_words(failure.left)} ended early with exit code 0; " if failure.left else ""
        return f"{left}{ranks_in_words(failure.alike, self.world_size)}: {says}"

    @property
    def seconds(self) -> float | None:
        """Seconds from the request to the end of the run; None before the end, if the recorded clock ran backwards, and
        for an imported run, whose files have a part of it."""
        return None if self.imported else elapsed(self.status.started, self.status.ended)

    @property
    def now(self) -> float | None:
        """The time of the newest sample of the supervisor, in Unix seconds; None if there is none."""
        return float(self.system.t[-1]) if len(self.system.t) else None

    def device_memory(self, rank: int) -> float | None:
        """The memory of a rank's GPU in bytes; None on the CPU, and on a node whose GPUs were not sampled."""
        device = self.ranks[rank].device.removeprefix("cuda:") if rank in self.ranks else ""
        return float(self.system.gpu_memory_total.get(int(device)) or 0) or None if device.isdigit() else None

    @property
    def replicas(self) -> float:
        """The number of ranks that train on the same samples: 1 under data parallelism, the world size under tensor
        parallelism.
        """
        return max(1.0, self.world_size / self._asked.data_ranks) if self._asked else 1.0

    def sample_weights(self) -> dict[int, float]:
        """By rank, the weight of its samples, so that each sample counts once (see ranks.py)."""
        if self._asked is not None:
            return dict.fromkeys(self.ranks, 1 / self.replicas)
        readers, later_stages = inferred(self.ranks)
        alike = {rank: len(ranks) for ranks in readers for rank in ranks}
        return {rank: 0.0 if rank in later_stages else 1 / alike.get(rank, 1) for rank in self.ranks}

    def loss_at(self, index: int = -1) -> float | None:
        """The mean of the ranks' losses at a step index (each for its own part of the batch); None if no rank has
        one."""
        losses = []
        for rank in self.ranks.values():
            if -len(rank.steps) <= index < len(rank.steps) and not math.isnan(rank.steps.loss[index]):
                losses.append(rank.steps.loss[index])
        return sum(losses) / len(losses) if losses else None

    def metric(self, name: str) -> Value:
        """The newest value of a metric that the script logged; None if it logged none."""
        return self._newest_metrics.get(name)

    # ---- what went wrong

    @property
    def failure(self) -> Failure | None:
        """The first failure, see `ranks.failure_of`; None if no rank failed."""
        return _failure(self)

    def exit_code(self, rank: int) -> int | None:
        """A rank's exit code, from its own last event or from torchrun's report; None if it was terminated with its
        group."""
        return exit_code(self.ranks, self.status, rank)


@per_revision
def _failure(state: RunState) -> Failure | None:
    return failure_of(state.ranks, state.status, state.over)


def _sample(columns: dict[str, array[float]], t: float, sample: Recorded, names: tuple[str, ...]) -> None:
    """Adds one sample to columns, which have the names of its fields."""
    columns.setdefault("t", numbers()).append(t)
    for name in names:
        columns.setdefault(name, numbers()).append(number(getattr(sample, name)))


_Texts = TypeVar("_Texts", bound=Recorded)


def _with_short_texts(record: _Texts) -> _Texts:
    """A record with each of its texts clipped to a length that can be searched at each redraw."""
    texts = {name: getattr(record, name) for name in record.__struct_fields__}
    limits = {name: MESSAGE_LIMIT if name == "message" else TEXT_LIMIT for name in texts}
    return replace(
        record, **{name: clipped(text, limits[name]) for name, text in texts.items() if isinstance(text, str)}
    )


def _handlers() -> dict[type, Callable[[RunState, Any], None]]:
    """By the type of what is folded in, the method that does it: that whose parameter has this type."""
    found: dict[type, Callable[[RunState, Any], None]] = {}
    for name, method in vars(RunState).items():
        if name.startswith("_on_"):
            folded, _ = get_type_hints(method).values()
            found |= dict.fromkeys(get_args(folded) or (folded,), method)
    return found


_HANDLERS = _handlers()


# ---- the start of a run: the milestones of each rank before its first step

# In the order in which a script usually reaches them. Those in `writer.STARTUP` are missing if a script never reaches
# them, and in runs of versions that did not record them.
MILESTONES = {
    "agent": "torchrun started",
    "process": "process started",
    "torch": "torch imported",
    "group": "group formed",
    "data": "data ready",
    "batch": "first batch",
    "step": "first step",
}


@per_revision
def milestones(state: RunState) -> Mapping[int, Mapping[str, float]]:
    """By rank (including ranks that have not started), the seconds from the request of the run to each reached
    milestone.
    """
    agent = state.status.agent_began
    return {
        number: _reached_by(state, state.ranks.get(number) or RankState(number), agent)
        for number in range(state.world_size)
    }


def _reached_by(state: RunState, rank: RankState, agent: float | None) -> dict[str, float]:
    first = rank.steps.t[rank.first_step] if len(rank.steps) > rank.first_step else None
    times = {"agent": agent, "process": rank.began, "torch": rank.started, **rank.startup, "step": first}
    after = {name: elapsed(state.status.started, times.get(name)) for name in MILESTONES}
    return {name: float(seconds) for name, seconds in after.items() if seconds is not None}


def is_starting(state: RunState) -> bool:
    """Whether a rank of a requested run has not finished its first step, even if the run has ended."""
    return (
        state.status.state != "ready"
        and not state.imported
        and any("step" not in reached for reached in milestones(state).values())
    )


def newest_milestone(state: RunState) -> str | None:
    """The milestone that was reached last, on any rank; None before the first."""
    of_ranks = milestones(state).values()
    names = [name for name in MILESTONES if any(name in reached for reached in of_ranks)]
    return max(names, key=lambda name: max(_seconds_to(of_ranks, name)), default=None)


def start_in_words(state: RunState) -> str:
    """How far a run has started: `torch imported on 1 of 2 ranks (3.1 s)`; empty before the first milestone, and once
    all ranks train."""
    name = newest_milestone(state) if is_starting(state) else None
    if name is None:
        return ""
    seconds = _seconds_to(milestones(state).values(), name)
    ranks = f" on {len(seconds)} of {state.world_size} ranks" if state.world_size > 1 and name != "agent" else ""
    return f"{MILESTONES[name]}{ranks} ({max(seconds):.1f} s)"


def _seconds_to(of_ranks: Iterable[Mapping[str, float]], name: str) -> list[float]:
    return [reached[name] for reached in of_ranks if name in reached]


def start_table(state: RunState) -> list[tuple[str, ...]]:
    """Rows of texts, a header and one per rank: the seconds of every milestone, `…` for one not reached yet.

    A skipped milestone, before others that were reached, is shown as `–`: the script may never reach it.
    """
    of_ranks = milestones(state)
    shown = [
        name
        for name in MILESTONES
        if name == "step" or any(name in reached for reached in of_ranks.values()) or not state.over
    ]
    rows = [("rank", *(MILESTONES[name] for name in shown))]
    return rows + [(str(number), *_start_cells(reached, shown, state.over)) for number, reached in of_ranks.items()]


def _start_cells(reached: Mapping[str, float], shown: list[str], over: bool) -> list[str]:
    last = max((index for index, name in enumerate(shown) if name in reached), default=-1)
    return [
        f"{reached[name]:.1f} s" if name in reached else "–" if over or index < last else "…"
        for index, name in enumerate(shown)
    ]
