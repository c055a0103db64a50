"""The parts of a RunState: the state of one rank, and the samples taken by the supervisor."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.record.steps import Steps


def numbers() -> array:
    """An empty column."""
    return array("d")


@dataclass
class Losses:
    """The losses of an optimizer other than the pacemaker, and the step of the run to which each belongs."""

    step: array = field(default_factory=numbers)
    loss: array = field(default_factory=numbers)


@dataclass
class RankState:
    """The state of one rank. Times are unix seconds; `attempts` maps each attempt to the index of its first step.

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
    began: float | None = None
    started: float | None = None
    startup: dict[str, float] = field(default_factory=dict)
    ended: float | None = None
    exit_code: int | None = None
    left_at: str = ""
    activity: str | None = None
    activity_since: float | None = None
    error: dict[str, Any] | None = None
    owners: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, Any] | None = None
    timelines: dict[int, dict[str, Any]] = field(default_factory=dict)
    memory_step: dict[str, Any] | None = None
    waiting: dict[str, Any] | None = None
    silent: dict[str, Any] | None = None
    not_finite: int | None = None
    saw: list[dict[str, Any]] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    losses: dict[int, Losses] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    pacemaker: int | None = None

    @property
    def timeline(self) -> dict[str, Any] | None:
        """The `timeline` event of the newest profiled step; None if there is none."""
        return self.timelines[max(self.timelines)] if self.timelines else None

    def seen(self, what: str) -> list[dict[str, Any]]:
        """The observations of kind `what`, in order; see probe/observations.py."""
        return [one for one in self.saw if one["what"] == what]

    @property
    def models(self) -> list[dict[str, Any]]:
        """The models that train, in the order of their first call; loss modules, which older versions recorded, are
        left out.
        """
        return [one for one in self.seen("model") if one.get("parameters")]

    @property
    def first_step(self) -> int:
        """The index of the first step of the newest attempt, recorded or not."""
        return self.attempts.get(self.attempt, 0)

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that the rank sent in the newest measured step; 0 without a process group, None if unknown."""
        return None if self.traffic is None else float(sum(op["sent"] for op in self.traffic["ops"].values()))

    @property
    def peak_memory(self) -> int | None:
        """The largest peak of any step, in bytes; None if unknown."""
        return self.steps.peak


@dataclass
class System:
    """Samples taken by the supervisor: times `t`, and columns by device index or rank."""

    t: array = field(default_factory=numbers)
    cpu_percent: array = field(default_factory=numbers)
    memory_used: array = field(default_factory=numbers)
    gpus: dict[int, dict[str, array]] = field(default_factory=dict)
    gpu_memory_total: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, dict[str, array]] = field(default_factory=dict)


def whole_timeline(event: Mapping[str, Any]) -> dict[str, Any]:
    """A timeline with all fields that figures and findings read. Raises if the event is invalid."""
    spans = {
        name: [[str(span[0]), float(span[1]), float(span[2]), *span[3:]] for span in event[name]]
        for name in ("phases", "comm", "marks")
    }
    spans["comm"] = [[*span, None, None, None, None][:7] for span in spans["comm"]]
    busy = [[float(start), float(end)] for start, end in event["busy"]]
    exposed = {str(name): float(seconds) for name, seconds in event["exposed"].items()}
    plain = {
        "device": event.get("device", "cpu"),
        "backend": event.get("backend", ""),
        "left_out": int(event.get("left_out", 0)),
    }
    moments = {"step": int(event["step"]), "t0": float(event["t0"]), "seconds": float(event["seconds"])}
    return spans | plain | moments | {"busy": busy, "exposed": exposed}
