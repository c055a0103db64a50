"""RunState: one pure fold over events. Live charts, terminal, replay, summary and tests all read the same state.

`apply` takes one event at a time, in any order between ranks. Kinds without a handler are ignored. Events are trusted:
`labkit.record` checks them when they are read, and the reader counts broken lines in `broken`. `spec` and `status` are
applied as events of those kinds, so a replayed run is handled like a live one.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from labkit.common.units import ranks_in_words
from labkit.plan.spec import Spec, SpecError
from labkit.record.columns import Losses, RankState, System, numbers, whole_timeline
from labkit.record.events import OWNERS, STARTUP, StepBlock
from labkit.record.failures import exit_code, failure_of
from labkit.record.sources import inferred, inferred_note
from labkit.record.stacks import MESSAGE_LIMIT, TEXT_LIMIT, clipped
from labkit.record.steps import number, total
from labkit.record.types import measured, observed, reported
from labkit.record.types.summary import Failure, ReplicaFigures

OVER = ("finished", "failed", "stopped", "lost")
_TRAINS = ("training", "evaluating")  # any other activity of a rank is a preparation, in words
_TIMELINES = 20  # stored per rank
_SEEN = 200
_METRICS = 1000  # stored metrics, the newest
_NAMES = 1000  # names of metrics and reported values that are stored
_RECENT = 50  # newest steps over which current speed and time left are averaged


_Derived = TypeVar("_Derived")


def per_revision(compute: Callable[[RunState], _Derived]) -> Callable[[RunState], _Derived]:
    """Caches `compute(state)` per revision of the state, so that all views share one computation."""

    @functools.wraps(compute)
    def known(state: RunState) -> _Derived:
        revision = state.revision
        if state.derived.get(compute, (None, None))[0] != revision:
            state.derived[compute] = revision, compute(state)
        value: _Derived = state.derived[compute][1]
        return value

    return known


def elapsed(start: float | None, end: float | None) -> float | None:
    """Seconds between two times of a run; None if one is unknown, or if they are reversed (older versions had no steady
    clock).
    """
    return end - start if start and end and end >= start else None


class RunState:
    """The state of a run, folded from its events."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.ranks: dict[int, RankState] = {}
        self.metrics: deque[dict[str, Any]] = deque(maxlen=_METRICS)
        self._newest_metrics: dict[str | None, Any] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self.system = System()
        self.broken = 0
        self.unwatched: list[dict[str, Any]] = []
        self.dropped: dict[int, int] = {}
        self.in_threads: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.derived: dict[Any, tuple[Any, Any]] = {}  # cache of `per_revision`: revision and value
        self._asked: Spec | None = None
        self._applied = 0

    @property
    def revision(self) -> tuple[int, int]:
        """A value that changes whenever the state changes."""
        return self._applied, self.broken

    def apply(self, event: Mapping[str, Any]) -> None:
        """Folds one event in."""
        handler = _HANDLERS.get(event.get("kind"))
        if handler is not None:
            self._applied += 1
            handler(self, event)

    # ---- the Spec, and the progress

    @property
    def asked(self) -> Spec | None:
        """The Spec of a run of a strategy; None for any other script, and for a Spec of a newer version."""
        return self._asked

    @property
    def world_size(self) -> int:
        """The number of ranks (processes), as requested or as observed."""
        return self._asked.processes if self._asked else self.spec.get("nproc") or max(len(self.ranks), 1)

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole run; None if only the script knows it."""
        return self._asked.total_steps if self._asked else None

    @property
    def step(self) -> int:
        """The number of steps that all ranks have finished in the newest attempt."""
        done = [int(rank.steps.step[-1]) if len(rank.steps) > rank.first_step else 0 for rank in self.ranks.values()]
        return min(done) if len(done) == self.world_size else 0

    @property
    def note(self) -> str:
        """Remarks: how the run differs from the strategy's title (such as emulation), how a script's samples are
        counted, and why the run started cold. Empty if there are none.
        """
        note = self._asked.strategy_row.note(self._asked.device) if self._asked else inferred_note(self.ranks)
        because = self.status.get("cold_because")
        return " ".join(part for part in (note, f"The run started cold: {because}." if because else "") if part)

    @property
    def over(self) -> bool:
        """Whether the run has ended, in any state."""
        return self.status.get("state") in OVER

    @property
    def words(self) -> str:
        """The state in words: ready, starting ranks, building an extension, training, …, finished, failed (…), lost
        (…)."""
        state: str = self.status.get("state", "ready")
        if state == "failed":
            return f"failed ({self._failure_words})"
        if state == "lost":
            return f"lost ({self.status.get('message')})"
        if state != "running":
            return {"starting": "starting ranks"}.get(state, state)
        activities = {rank.activity for rank in self.ranks.values()}
        if len(self.ranks) < self.world_size or activities <= {None}:
            return "starting ranks"
        preparing = sorted(one for one in activities if one is not None and one not in _TRAINS)
        if preparing:
            return preparing[0]
        return "evaluating" if activities == {"evaluating"} else "training"

    @property
    def _failure_words(self) -> str:
        failure = self.failure
        if failure is None:
            return self.status.get("message") or "the ranks reported no reason"
        says = failure["type"] + (f": {failure['message']}" if failure["message"] else "")
        left = f"{ranks_in_words(failure['left'])} ended early with exit code 0; " if failure["left"] else ""
        return f"{left}{ranks_in_words(failure['alike'], self.world_size)}: {says}"

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the speed of the newest steps; None before the first steps, or if the total is unknown."""
        total, pace = self.total_steps, self.step_seconds_now
        if total is None or pace is None:
            return None
        return max(0, total - self.step) * pace

    @property
    def step_seconds_now(self) -> float | None:
        """Mean seconds between the newest steps of the slowest rank."""
        paces = []
        for rank in self.ranks.values():
            times = rank.steps.t[max(rank.first_step, len(rank.steps) - _RECENT) :]
            if len(times) > 1:
                paces.append(float(times[-1] - times[0]) / (len(times) - 1))
        return max(paces) if paces and max(paces) >= 0 else None

    @property
    def seconds(self) -> float | None:
        """Seconds from the request to the end of the run; None before the end, or if the recorded clock ran
        backwards."""
        return elapsed(self.status.get("started"), self.status.get("ended"))

    @property
    def replicas(self) -> float:
        """The number of ranks that train on the same samples: 1 under data parallelism, the world size under tensor
        parallelism.
        """
        return max(1.0, self.world_size / self._asked.data_ranks) if self._asked else 1.0

    def sample_weights(self) -> dict[int, float]:
        """By rank, the weight of its samples, so that each sample counts once (see sources.py)."""
        if self._asked is not None:
            return dict.fromkeys(self.ranks, 1 / self.replicas)
        readers, later_stages = inferred(self.ranks)
        alike = {rank: len(ranks) for ranks in readers for rank in ranks}
        return {rank: 0.0 if rank in later_stages else 1 / alike.get(rank, 1) for rank in self.ranks}

    @property
    def gil_wait(self) -> float | None:
        """The median share of time, over the newest steps, that a thread of dp's process waited for the GIL or a
        core."""
        known = [event["gil_wait"] for event in self.in_threads if event["gil_wait"] is not None]
        return statistics.median(known) if known else None

    def replica_figures(self) -> list[ReplicaFigures]:
        """Medians over the newest steps for each replica (thread) of dp; replica 0 has `extra` bytes. Empty without
        replicas.
        """
        found: dict[int, list[dict[str, Any]]] = {}
        for event in self.in_threads:
            for one in event["replicas"]:
                found.setdefault(one["replica"], []).append(one)
        measured = ("forward", "cpu", "samples", "memory")
        figures = [
            cast(
                ReplicaFigures,
                {"replica": number, "device": those[-1]["device"]}
                | {name: statistics.median(one[name] for one in those) for name in measured},
            )
            for number, those in sorted(found.items())
        ]
        if figures:
            figures[0]["extra"] = self.in_threads[-1]["extra"]
        return figures

    def throughput(self, recent: int | None = None) -> float | None:
        """Samples per second over all ranks, each sample counted once; over the `recent` newest steps, or all but the
        first.
        """
        speed, counts = 0.0, self.sample_weights()
        for rank in self.ranks.values():
            first = rank.first_step + 1
            if recent:
                first = max(first, len(rank.steps) - recent)
            seconds = total(rank.steps.seconds, first)
            if seconds > 0:
                speed += counts[rank.rank] * total(rank.steps.samples, first) / seconds
        return speed or None

    def loss_at(self, index: int = -1) -> float | None:
        """The mean of the ranks' losses at a step index (each for its own part of the batch); None if no rank has
        one."""
        losses = []
        for rank in self.ranks.values():
            if -len(rank.steps) <= index < len(rank.steps) and not math.isnan(rank.steps.loss[index]):
                losses.append(rank.steps.loss[index])
        return sum(losses) / len(losses) if losses else None

    def metric(self, name: str) -> Any:
        """The newest value of a metric that the script logged; None if it logged none."""
        return self._newest_metrics.get(name)

    # ---- what went wrong

    @property
    def failure(self) -> Failure | None:
        """The first failure, see `failures.failure_of`; None if no rank failed."""
        return _failure(self)

    def exit_code(self, rank: int) -> int | None:
        """A rank's exit code, from its own last event or from torchrun's report; None if it was terminated with its
        group."""
        return exit_code(self.ranks, self.status, rank)

    # ---- the handlers, one for each kind of event

    def _rank(self, event: Mapping[str, Any]) -> RankState:
        number = event["rank"]
        if not isinstance(number, int):
            raise TypeError(number)
        return self.ranks.setdefault(number, RankState(number))

    def _on_spec(self, event: Mapping[str, Any]) -> None:
        self.spec = dict(event["spec"])
        try:
            spec = Spec.from_json(self.spec)
        except SpecError:
            spec = None  # of a newer version: the run is still shown, but its totals are unknown
        self._asked = spec if spec and spec.strategy and spec.nproc else None

    def _on_status(self, event: Mapping[str, Any]) -> None:
        self.status = _with_short_texts(event["status"])

    def _on_start(self, event: reported.Start) -> None:
        rank = self._rank(event)
        rank.pid, rank.host = event.get("pid"), event.get("host")
        rank.device, rank.device_name = event.get("device", "cpu"), event.get("device_name", "")
        rank.attempt = event.get("attempt", 0)
        rank.attempts[rank.attempt] = len(rank.steps)
        rank.started, rank.ended, rank.exit_code, rank.error, rank.activity = event["t"], None, None, None, None
        rank.waiting, rank.not_finite, rank.saw, rank.timelines, rank.left_at = None, None, [], {}, ""
        rank.began, rank.startup = event.get("began"), {}

    def _on_startup(self, event: reported.Startup) -> None:
        startup = self._rank(event).startup
        if event["name"] in STARTUP:
            startup.setdefault(event["name"], event["t"])

    def _on_device(self, event: reported.Device) -> None:
        rank = self._rank(event)
        rank.device, rank.device_name = str(event["device"]), event.get("device_name", "")

    def _on_step(self, event: measured.Step) -> None:
        rank = self._rank(event)
        rank.steps.append(event)
        rank.waiting = None
        loss = event.get("loss")
        if rank.not_finite is None and loss is not None and not math.isfinite(loss):
            rank.not_finite = int(event["step"])

    def _on_steps(self, event: StepBlock) -> None:
        rank, before = self._rank(event), len(self._rank(event).steps)
        broken, diverged = rank.steps.extend(event["block"])
        self.broken += broken
        if len(rank.steps) > before:
            rank.waiting = None
        if rank.not_finite is None:
            rank.not_finite = diverged

    def _on_optimizer(self, event: measured.Optimizer) -> None:
        rank, which = self._rank(event), event["optimizer"]
        rank.optimizers[which] = event["name"] or f"optimizer {which + 1}"
        if event["sets_pace"]:
            rank.pacemaker = which

    def _on_losses(self, event: measured.Losses) -> None:
        losses = self._rank(event).losses.setdefault(event["optimizer"], Losses())
        for step, loss in event["points"]:
            losses.step.append(step)
            losses.loss.append(number(loss))

    def _on_memory(self, event: measured.Memory) -> None:
        self._rank(event).owners = {owner: int(size) for owner, size in event["owners"].items()}

    def _on_replica(self, event: measured.Replica) -> None:
        replicas = [
            {"replica": int(one["replica"]), "device": str(one["device"])}
            | {name: float(one[name]) for name in ("forward", "cpu", "samples", "memory")}
            for one in event["replicas"]
        ]
        wait = event.get("gil_wait")
        self.in_threads.append(
            {"replicas": replicas, "extra": event["extra"], "gil_wait": None if wait is None else float(wait)}
        )

    def _on_traffic(self, event: measured.Traffic) -> None:
        self._rank(event).traffic = {"step": event["step"], "ops": dict(event["ops"])}

    def _on_timeline(self, event: measured.Timeline) -> None:
        timelines = self._rank(event).timelines
        timelines[int(event["step"])] = whole_timeline(event)
        while len(timelines) > _TIMELINES:
            del timelines[min(timelines)]

    def _on_memory_step(self, event: measured.MemoryStep) -> None:
        columns = {
            owner: [int(size) for size in event["owners"][owner]] for owner in OWNERS if owner in event["owners"]
        }
        times = [float(time) for time in event["times"]]
        if any(len(column) != len(times) for column in columns.values()):
            raise ValueError("columns of different lengths")
        self._rank(event).memory_step = {
            "step": event["step"],
            "t0": event["t0"],
            "seconds": event["seconds"],
            "phases": event["phases"],
            "peak": event["peak"],
            "at_peak": event["at_peak"],
            "times": times,
            "owners": columns,
        }

    def _on_waiting(self, event: reported.Waiting) -> None:
        whole: reported.Waiting = {"ops": [], "stack": "", "computed": None, **event}
        self._rank(event).waiting = _with_short_texts(whole)

    def _on_going_on(self, event: reported.GoingOn) -> None:
        self._rank(event).waiting = None

    def _on_silent(self, event: reported.Silent) -> None:
        whole: reported.Silent = {"stack": "", "computed": None, **event}
        self._rank(event).silent = _with_short_texts(whole)

    def _on_heard(self, event: reported.Heard) -> None:
        self._rank(event).silent = None

    def _on_saw(self, event: observed.Seen) -> None:
        saw = self._rank(event).saw
        if len(saw) < _SEEN:
            saw.append(event)

    def _on_activity(self, event: reported.Activity) -> None:
        rank = self._rank(event)
        rank.activity, rank.activity_since = event["name"], event["t"]

    def _on_metric(self, event: reported.Metric) -> None:
        name, value = event.get("name"), event.get("value")
        self.metrics.append(
            {"t": event["t"], "rank": event.get("rank"), "name": name, "value": value, "step": event.get("step")}
        )
        if name in self._newest_metrics or len(self._newest_metrics) < _NAMES:
            self._newest_metrics[name] = value

    def _on_report(self, event: reported.Report) -> None:
        reported = self.reports.setdefault(self._rank(event).rank, {})
        for name, value in event["values"].items():
            if name in reported or len(reported) < _NAMES:
                reported[name] = value

    def _on_error(self, event: reported.Error) -> None:
        whole: reported.Error = {"type": "", "message": "", "traceback": "", **event}
        whole["type"] = whole["type"] or "Exception"
        self._rank(event).error = _with_short_texts(whole)

    def _on_probe_error(self, event: reported.ProbeError) -> None:
        if len(self.unwatched) < _SEEN:
            lost = {name: event[name] for name in ("part", "type", "message")}
            self.unwatched.append({"rank": self._rank(event).rank} | _with_short_texts(lost))

    def _on_dropped(self, event: reported.Dropped) -> None:
        rank = self._rank(event).rank
        self.dropped[rank] = self.dropped.get(rank, 0) + int(event["events"])

    def _on_end(self, event: reported.End) -> None:
        rank = self._rank(event)
        rank.ended, rank.exit_code = event["t"], event.get("exit_code")
        rank.left_at = clipped(str(event.get("stack") or ""))

    def _on_system(self, event: measured.System) -> None:
        system = self.system
        system.t.append(float(event["t"]))
        system.cpu_percent.append(number(event.get("cpu_percent")))
        system.memory_used.append(number(event.get("memory_used")))
        for gpu in event.get("gpus") or []:
            columns = system.gpus.setdefault(
                gpu["index"], {name: numbers() for name in ("t", "memory_used", "utilisation", "power")}
            )
            columns["t"].append(float(event["t"]))
            for name in ("memory_used", "utilisation", "power"):
                columns[name].append(number(gpu.get(name)))
            system.gpu_memory_total[gpu["index"]] = int(gpu.get("memory_total") or 0)
        for name, process in (event.get("ranks") or {}).items():
            columns = system.ranks.setdefault(int(name), {name: numbers() for name in ("t", "cpu_percent", "rss")})
            columns["t"].append(float(event["t"]))
            for name in ("cpu_percent", "rss"):
                columns[name].append(number(process.get(name)))


_Fields = TypeVar("_Fields", bound=Mapping[str, Any])


def _with_short_texts(fields: _Fields) -> _Fields:
    """The fields with every text, at any depth, clipped to a length that can be searched at each redraw."""

    def short(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_short_texts(value)
        return clipped(value, MESSAGE_LIMIT if name == "message" else TEXT_LIMIT) if isinstance(value, str) else value

    return cast(_Fields, {name: short(name, value) for name, value in fields.items()})


@per_revision
def _failure(state: RunState) -> Failure | None:
    return failure_of(state.ranks, state.status, state.over)


_HANDLERS: dict[Any, Callable[[RunState, Any], None]] = {
    "spec": RunState._on_spec,
    "status": RunState._on_status,
    "start": RunState._on_start,
    "startup": RunState._on_startup,
    "device": RunState._on_device,
    "step": RunState._on_step,
    "steps": RunState._on_steps,
    "optimizer": RunState._on_optimizer,
    "losses": RunState._on_losses,
    "memory": RunState._on_memory,
    "replica": RunState._on_replica,
    "traffic": RunState._on_traffic,
    "timeline": RunState._on_timeline,
    "memory_step": RunState._on_memory_step,
    "waiting": RunState._on_waiting,
    "going_on": RunState._on_going_on,
    "silent": RunState._on_silent,
    "heard": RunState._on_heard,
    "saw": RunState._on_saw,
    "activity": RunState._on_activity,
    "metric": RunState._on_metric,
    "report": RunState._on_report,
    "error": RunState._on_error,
    "probe_error": RunState._on_probe_error,
    "dropped": RunState._on_dropped,
    "end": RunState._on_end,
    "system": RunState._on_system,
}
