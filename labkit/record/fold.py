"""The fold: what the events of a run add up to, as plain data.

`Fold.apply` takes one event at a time, in any order between ranks. Kinds without a handler are ignored. Events are
trusted: `labkit.record` checks them when they are read. `spec` and `status` are applied as events of those kinds, so a
replayed run is handled like a live one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from labkit.plan.spec import Spec, SpecError
from labkit.record.columns import Losses, RankState, System, numbers, whole_timeline
from labkit.record.events import OWNERS, STARTUP, StepBlock
from labkit.record.stacks import MESSAGE_LIMIT, TEXT_LIMIT, clipped
from labkit.record.steps import number
from labkit.record.types import measured, observed, reported
from labkit.record.types.documents import KnownStatus, SpecFields
from labkit.record.types.guess import Guessed
from labkit.record.types.prediction import Plan

_TIMELINES = 20  # stored per rank
_SEEN = 200
_METRICS = 1000  # stored metrics, the newest
_NAMES = 1000  # names of metrics and reported values that are stored
_REPLICA_STEPS = 50  # newest steps of which the figures of dp's replicas are stored


class Fold:
    """What the events of a run say: its Spec, status and prediction, ranks, metrics, reports and samples. `guess` has
    what the learner predicted, by figure; `queue` the state of the scheduler's job; `nodes` when nodes met and were cut
    off; `broken` counts unusable lines.
    """

    def __init__(self) -> None:
        self.spec: SpecFields = {}
        self.status: KnownStatus = {}
        self.prediction: Plan | None = None
        self.guess: dict[str, Guessed] = {}
        self.ranks: dict[int, RankState] = {}
        self.metrics: deque[dict[str, Any]] = deque(maxlen=_METRICS)
        self.reports: dict[int, dict[str, Any]] = {}
        self.system = System()
        self.queue: reported.Queue | None = None
        self.nodes: deque[reported.Hosts | reported.CutOff] = deque(maxlen=_SEEN)
        self.broken = 0
        self.unwatched: list[dict[str, Any]] = []
        self.dropped: dict[int, int] = {}
        self.in_threads: deque[dict[str, Any]] = deque(maxlen=_REPLICA_STEPS)
        self._asked: Spec | None = None
        self._newest_metrics: dict[str | None, Any] = {}
        self._applied = 0

    @property
    def revision(self) -> int:
        """The number of changes so far: it grows whenever the state changes, and with nothing else."""
        return self._applied + self.broken

    def apply(self, event: Mapping[str, Any]) -> None:
        """Folds one event in."""
        handler = HANDLERS.get(event.get("kind"))
        if handler is not None:
            try:
                handler(self, event)
            finally:  # counted last: what another thread derived from half of a change is derived again
                self._applied += 1

    def _rank(self, event: Mapping[str, Any]) -> RankState:
        number = event["rank"]
        if not isinstance(number, int):
            raise TypeError(number)
        if number not in self.ranks:  # in order, whichever file is read first
            self.ranks = dict(sorted({**self.ranks, number: RankState(number)}.items()))
        return self.ranks[number]

    def _on_spec(self, event: Mapping[str, Any]) -> None:
        self.spec = cast(SpecFields, dict(event["spec"]))
        try:
            spec = Spec.from_json(self.spec)
        except SpecError:
            spec = None  # of a newer version: the run is still shown, but its totals are unknown
        self._asked = spec if spec and spec.strategy and spec.nproc else None

    def _on_guess(self, event: Mapping[str, Any]) -> None:
        self.guess = event["guess"]["figures"]

    def _on_status(self, event: Mapping[str, Any]) -> None:
        self.status = _with_short_texts(event["status"])

    def _on_start(self, event: reported.Start) -> None:
        rank = self._rank(event)
        rank.pid, rank.host = event.get("pid"), event.get("host")
        rank.device, rank.device_name = event.get("device", "cpu"), event.get("device_name", "")
        rank.attempt = event.get("attempt", 0)
        rank.attempts.pop(rank.attempt, None)  # in the order of their first steps, whatever their numbers are
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
        if rank.not_finite is None and not math.isfinite(event.get("loss") or 0.0):
            rank.not_finite = int(event["step"])

    def _on_steps(self, event: StepBlock) -> None:
        rank, before = self._rank(event), len(self._rank(event).steps)
        broken, diverged = rank.steps.extend(event["block"])
        self.broken += broken
        if len(rank.steps) > before:
            rank.waiting = None
        rank.not_finite = diverged if rank.not_finite is None else rank.not_finite

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
        self.in_threads.append({"replicas": replicas, "extra": event["extra"], "gil_wait": event.get("gil_wait")})

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


HANDLERS: dict[Any, Callable[[Fold, Any], None]] = {
    "spec": Fold._on_spec,
    "status": Fold._on_status,
    "prediction": lambda fold, event: setattr(fold, "prediction", event["prediction"]),
    "guess": Fold._on_guess,
    "start": Fold._on_start,
    "startup": Fold._on_startup,
    "device": Fold._on_device,
    "step": Fold._on_step,
    "steps": Fold._on_steps,
    "optimizer": Fold._on_optimizer,
    "losses": Fold._on_losses,
    "memory": Fold._on_memory,
    "replica": Fold._on_replica,
    "traffic": Fold._on_traffic,
    "timeline": Fold._on_timeline,
    "memory_step": Fold._on_memory_step,
    "waiting": Fold._on_waiting,
    "going_on": Fold._on_going_on,
    "silent": Fold._on_silent,
    "heard": Fold._on_heard,
    "saw": Fold._on_saw,
    "activity": Fold._on_activity,
    "metric": Fold._on_metric,
    "report": Fold._on_report,
    "error": Fold._on_error,
    "probe_error": Fold._on_probe_error,
    "dropped": Fold._on_dropped,
    **dict.fromkeys(("hosts", "cut_off"), lambda fold, event: fold.nodes.append(event)),
    "queue": lambda fold, event: setattr(fold, "queue", event),
    "end": Fold._on_end,
    "system": Fold._on_system,
}
