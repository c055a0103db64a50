"""RunState: one pure fold over events. Live charts, terminal, replay, summary and tests all read the same state.

`apply` takes one event at a time, in any order between ranks. A kind that has no handler passes; a known kind with fields that
make no sense is counted in `broken`, never fatal. `spec` and `status` are fed in as events of those kinds, so a run that is
replayed goes the same way as one that is live.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from labkit.columns import RankState, System, number, numbers, whole_timeline
from labkit.events import OWNERS
from labkit.spec import Spec, SpecError

OVER = ("finished", "failed", "stopped")
_TIMELINES = 20  # of a rank, that are kept
_SEEN = 200
_RECENT = 50  # steps that "now" is the mean of, for speed and time left

# What ranks say whose peer has gone, by gloo, NCCL and torchrun: a consequence, wherever an error of another kind is known.
PEER_GONE = re.compile(
    r"connection (?:was likely )?(?:closed|reset|refused)|broken pipe|timed out|timeout|remote process exited|peer closed", re.IGNORECASE
)


class RunState:
    """Everything that is known of a run, folded from its events."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.ranks: dict[int, RankState] = {}
        self.metrics: list[dict[str, Any]] = []
        self.reports: dict[int, dict[str, Any]] = {}
        self.system = System()
        self.broken = 0
        self.unwatched: list[dict[str, Any]] = []
        self.in_threads: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._asked: Spec | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Folds one event in."""
        handler = _HANDLERS.get(event.get("kind"))
        if handler is None:
            return
        try:
            handler(self, event)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            self.broken += 1

    # ---- what was asked, and how far it is

    @property
    def asked(self) -> Spec | None:
        """The Spec of a strategy's run; None for a script of one's own, and for a Spec of a version that knew more."""
        return self._asked

    @property
    def world_size(self) -> int:
        """Ranks of the run, which are processes, as asked or as seen."""
        return self._asked.processes if self._asked else self.spec.get("nproc") or max(len(self.ranks), 1)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None where only the script knows."""
        return self._asked.total_steps if self._asked else None

    @property
    def step(self) -> int:
        """Steps that every rank has finished (of the newest attempt)."""
        done = [int(rank.steps.step[-1]) if len(rank.steps) > rank.first_step else 0 for rank in self.ranks.values()]
        return min(done) if len(done) == self.world_size else 0

    @property
    def note(self) -> str:
        """What the run is not what its strategy's title says, such as an emulation; empty where all is as said."""
        return self._asked.strategy_row.note(self._asked.device) if self._asked else ""

    @property
    def over(self) -> bool:
        """Whether the run has ended, however."""
        return self.status.get("state") in OVER

    @property
    def words(self) -> str:
        """The state in words: ready, starting ranks, training, evaluating, stopping, finished, stopped, failed (rank 1: …)."""
        state = self.status.get("state", "ready")
        if state == "failed":
            return f"failed ({self._failure_words})"
        if state != "running":
            return {"starting": "starting ranks"}.get(state, state)
        activities = {rank.activity for rank in self.ranks.values()}
        if len(self.ranks) < self.world_size or activities <= {None}:
            return "starting ranks"
        return "evaluating" if activities == {"evaluating"} else "training"

    @property
    def _failure_words(self) -> str:
        failure = self.failure
        if failure is None:
            return self.status.get("message") or "the ranks did not say why"
        return f"rank {failure['rank']}: {failure['type']}" + (f": {failure['message']}" if failure["message"] else "")

    @property
    def seconds_left(self) -> float | None:
        """Time left by the speed of the newest steps; None before the first steps, or where the total is not known."""
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
                paces.append((times[-1] - times[0]) / (len(times) - 1))
        return max(paces) if paces else None

    @property
    def replicas(self) -> float:
        """How many ranks see the same samples: 1 under data parallelism, the world size under tensor parallelism."""
        return max(1.0, self.world_size / self._asked.data_ranks) if self._asked else 1.0

    @property
    def gil_wait(self) -> float | None:
        """The median share of time, over the newest steps, that a thread of dp's process waited for the GIL or a core."""
        known = [event["gil_wait"] for event in self.in_threads if event["gil_wait"] is not None]
        return statistics.median(known) if known else None

    def replica_figures(self) -> list[dict[str, Any]]:
        """Medians over the newest steps, for each replica in a thread; replica 0 has `extra` bytes. Empty where there is none."""
        found: dict[int, list[dict[str, Any]]] = {}
        for event in self.in_threads:
            for one in event["replicas"]:
                found.setdefault(one["replica"], []).append(one)
        measured = ("forward", "cpu", "samples", "memory")
        figures = [
            {"replica": number, "device": those[-1]["device"]} | {name: statistics.median(one[name] for one in those) for name in measured}
            for number, those in sorted(found.items())
        ]
        if figures:
            figures[0]["extra"] = dict(self.in_threads[-1]["extra"])
        return figures

    def throughput(self, recent: int | None = None) -> float | None:
        """Samples per second over all ranks, each sample counted once; of the `recent` newest steps, or of all but the first."""
        total = 0.0
        for rank in self.ranks.values():
            first = rank.first_step + 1
            if recent:
                first = max(first, len(rank.steps) - recent)
            seconds = sum(value for value in rank.steps.seconds[first:] if not math.isnan(value))
            if seconds > 0:
                total += sum(value for value in rank.steps.samples[first:] if not math.isnan(value)) / seconds
        return total / self.replicas if total else None

    def loss_at(self, index: int = -1) -> float | None:
        """The mean of the ranks' losses at a step index (each rank's own share of the batch); None where no rank has one."""
        losses = []
        for rank in self.ranks.values():
            if -len(rank.steps) <= index < len(rank.steps) and not math.isnan(rank.steps.loss[index]):
                losses.append(rank.steps.loss[index])
        return statistics.fmean(losses) if losses else None

    def metric(self, name: str) -> Any:
        """The newest value of a metric that the script logged; None where it logged none."""
        return next((metric["value"] for metric in reversed(self.metrics) if metric["name"] == name), None)

    # ---- what went wrong

    @property
    def failure(self) -> dict[str, Any] | None:
        """The first rank that failed: rank, type, message, traceback, exit_code, and the ranks that fell with it; None if none did.

        Of several errors the first in time counts, but one that only says that a peer has gone never outranks the
        peer itself: a rank that died by a signal leaves no error event, only the others' complaints. Once the run is over, a rank
        that has not said how it ended was ended with the others, whether torchrun reports it or not.
        """
        failures = self._failures()
        if not failures:
            return None
        first = min(failures, key=lambda failure: (failure["consequence"], failure["t"]))
        fell = {failure["rank"] for failure in failures}
        if self.over:
            fell |= {rank.rank for rank in self.ranks.values() if rank.exit_code is None}
        others = sorted(fell - {first["rank"]})
        shown = {name: first[name] for name in ("rank", "type", "message", "traceback", "exit_code")}
        return shown | {"collateral": others}

    def _failures(self) -> list[dict[str, Any]]:
        found = {}
        for rank in self.ranks.values():
            if rank.error:
                text = f"{rank.error.get('type')} {rank.error.get('message')}"
                found[rank.rank] = {
                    "rank": rank.rank,
                    "t": rank.error["t"],
                    "type": rank.error.get("type", "Exception"),
                    "message": rank.error.get("message", ""),
                    "traceback": rank.error.get("traceback", ""),
                    "exit_code": self.exit_code(rank.rank),
                    "consequence": bool(PEER_GONE.search(text)),
                }
        for name, failure in (self.status.get("failures") or {}).items():
            rank = int(name)
            if rank not in found and failure.get("exit_code"):
                found[rank] = {
                    "rank": rank,
                    "t": failure.get("t", math.inf),
                    "type": failure.get("signal") or f"exit code {failure['exit_code']}",
                    "message": failure.get("message", ""),
                    "traceback": "",
                    "exit_code": failure["exit_code"],
                    "consequence": failure.get("signal") == "SIGTERM",
                }
        return list(found.values())

    def exit_code(self, rank: int) -> int | None:
        """A rank's exit code, from its own last event or from torchrun's report; None where it was ended with its group."""
        state = self.ranks.get(rank)
        if state is not None and state.exit_code is not None:
            return state.exit_code
        reported = (self.status.get("failures") or {}).get(str(rank), {}).get("exit_code")
        return 1 if reported is None and state is not None and state.error else reported

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
            spec = None  # of a version that knew more: what it ran is still shown, its totals are not known
        self._asked = spec if spec and spec.strategy and spec.nproc else None

    def _on_status(self, event: Mapping[str, Any]) -> None:
        self.status = dict(event["status"])

    def _on_start(self, event: Mapping[str, Any]) -> None:
        rank = self._rank(event)
        rank.pid, rank.host = event.get("pid"), event.get("host")
        rank.device, rank.device_name = event.get("device", "cpu"), event.get("device_name", "")
        rank.attempt = event.get("attempt", 0)
        rank.attempts[rank.attempt] = len(rank.steps)
        rank.started, rank.ended, rank.exit_code, rank.error, rank.activity = event["t"], None, None, None, None
        rank.waiting, rank.not_finite, rank.saw, rank.timelines = None, None, [], {}

    def _on_device(self, event: Mapping[str, Any]) -> None:
        rank = self._rank(event)
        rank.device, rank.device_name = str(event["device"]), event.get("device_name", "")

    def _on_step(self, event: Mapping[str, Any]) -> None:
        rank = self._rank(event)
        rank.steps.append(event)
        rank.waiting = None
        if rank.not_finite is None and event.get("loss") is not None and not math.isfinite(event["loss"]):
            rank.not_finite = int(event["step"])

    def _on_memory(self, event: Mapping[str, Any]) -> None:
        self._rank(event).owners = {owner: int(size) for owner, size in event["owners"].items()}

    def _on_replica(self, event: Mapping[str, Any]) -> None:
        replicas = [
            {"replica": int(one["replica"]), "device": str(one["device"])}
            | {name: float(one[name]) for name in ("forward", "cpu", "samples", "memory")}
            for one in event["replicas"]
        ]
        wait = event.get("gil_wait")
        self.in_threads.append({"replicas": replicas, "extra": event["extra"], "gil_wait": None if wait is None else float(wait)})

    def _on_traffic(self, event: Mapping[str, Any]) -> None:
        self._rank(event).traffic = {"step": event["step"], "ops": dict(event["ops"])}

    def _on_timeline(self, event: Mapping[str, Any]) -> None:
        timelines = self._rank(event).timelines
        timelines[int(event["step"])] = whole_timeline(event)
        while len(timelines) > _TIMELINES:
            del timelines[min(timelines)]

    def _on_memory_step(self, event: Mapping[str, Any]) -> None:
        columns = {owner: [int(size) for size in event["owners"][owner]] for owner in OWNERS if owner in event["owners"]}
        times = [float(time) for time in event["times"]]
        if any(len(column) != len(times) for column in columns.values()):
            raise ValueError("columns of different lengths")
        kept = {name: event[name] for name in ("step", "t0", "seconds", "phases", "peak", "at_peak")}
        self._rank(event).memory_step = kept | {"times": times, "owners": columns}

    def _on_waiting(self, event: Mapping[str, Any]) -> None:
        self._rank(event).waiting = {"ops": [], "stack": "", "computed": None} | dict(event) | {"since": float(event["since"])}

    def _on_going_on(self, event: Mapping[str, Any]) -> None:
        self._rank(event).waiting = None

    def _on_saw(self, event: Mapping[str, Any]) -> None:
        saw = self._rank(event).saw
        if len(saw) < _SEEN:
            saw.append({"what": str(event["what"])} | dict(event))

    def _on_activity(self, event: Mapping[str, Any]) -> None:
        rank = self._rank(event)
        rank.activity, rank.activity_since = event["name"], event["t"]

    def _on_metric(self, event: Mapping[str, Any]) -> None:
        self.metrics.append({name: event.get(name) for name in ("t", "rank", "name", "value", "step")})

    def _on_report(self, event: Mapping[str, Any]) -> None:
        self.reports.setdefault(self._rank(event).rank, {}).update(event["values"])

    def _on_error(self, event: Mapping[str, Any]) -> None:
        self._rank(event).error = dict(event)

    def _on_probe_error(self, event: Mapping[str, Any]) -> None:
        self.unwatched.append({"rank": self._rank(event).rank} | {name: event[name] for name in ("part", "type", "message")})

    def _on_end(self, event: Mapping[str, Any]) -> None:
        rank = self._rank(event)
        rank.ended, rank.exit_code = event["t"], event.get("exit_code")

    def _on_system(self, event: Mapping[str, Any]) -> None:
        system = self.system
        system.t.append(float(event["t"]))
        system.cpu_percent.append(number(event.get("cpu_percent")))
        system.memory_used.append(number(event.get("memory_used")))
        for gpu in event.get("gpus") or []:
            columns = system.gpus.setdefault(gpu["index"], {name: numbers() for name in ("t", "memory_used", "utilisation", "power")})
            columns["t"].append(float(event["t"]))
            for name in ("memory_used", "utilisation", "power"):
                columns[name].append(number(gpu.get(name)))
            system.gpu_memory_total[gpu["index"]] = gpu.get("memory_total") or 0
        for name, process in (event.get("ranks") or {}).items():
            columns = system.ranks.setdefault(int(name), {name: numbers() for name in ("t", "cpu_percent", "rss")})
            columns["t"].append(float(event["t"]))
            for name in ("cpu_percent", "rss"):
                columns[name].append(number(process.get(name)))


_HANDLERS: dict[Any, Callable[[RunState, Mapping[str, Any]], None]] = {
    "spec": RunState._on_spec,
    "status": RunState._on_status,
    "start": RunState._on_start,
    "device": RunState._on_device,
    "step": RunState._on_step,
    "memory": RunState._on_memory,
    "replica": RunState._on_replica,
    "traffic": RunState._on_traffic,
    "timeline": RunState._on_timeline,
    "memory_step": RunState._on_memory_step,
    "waiting": RunState._on_waiting,
    "going_on": RunState._on_going_on,
    "saw": RunState._on_saw,
    "activity": RunState._on_activity,
    "metric": RunState._on_metric,
    "report": RunState._on_report,
    "error": RunState._on_error,
    "probe_error": RunState._on_probe_error,
    "end": RunState._on_end,
    "system": RunState._on_system,
}
