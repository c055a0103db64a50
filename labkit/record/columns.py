"""What a RunState is made of: all that is known of one rank, and the samples from outside."""

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
    """The losses of an optimizer that does not set the pace: of each of its steps, and the run's step that it belongs to."""

    step: array = field(default_factory=numbers)
    loss: array = field(default_factory=numbers)


@dataclass
class RankState:
    """What is known of one rank. Times are unix seconds; `attempts` maps each attempt to the index of its first step.

    `began` is when its process began, `started` when torch was imported, and `startup` when it reached what `startup` events name.

    `silent` is what the supervisor reported of a process that could not, and holds until it is heard again or has written anything since.
    `left_at` is the stack of the call that ended the script without an error, such as `sys.exit()`; empty if there was none.

    If several optimizers train on losses of their own, `optimizers` has their names by number; the loss of `steps` is that of the
    `pacemaker`, whose steps are the run's, and `losses` has those of the others.
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
        """The newest step that was looked at closely, by its `timeline` event; None where there is none."""
        return self.timelines[max(self.timelines)] if self.timelines else None

    def seen(self, what: str) -> list[dict[str, Any]]:
        """What was seen of one sort, in order; see probe/observations.py."""
        return [one for one in self.saw if one["what"] == what]

    @property
    def models(self) -> list[dict[str, Any]]:
        """The models that train, in the order of their first call; older versions recorded loss modules too, without parameters."""
        return [one for one in self.seen("model") if one.get("parameters")]

    @property
    def first_step(self) -> int:
        """The index of the newest attempt's first step, there or still to come."""
        return self.attempts.get(self.attempt, 0)

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that the rank sent in the newest step that was looked at; 0 without a process group, None where nothing was seen."""
        return None if self.traffic is None else float(sum(op["sent"] for op in self.traffic["ops"].values()))

    @property
    def peak_memory(self) -> int | None:
        """The largest peak of any step, in bytes; None where none was measured."""
        return self.steps.peak


@dataclass
class System:
    """Samples from outside the ranks: `t`, and by device index or rank the columns that were sampled."""

    t: array = field(default_factory=numbers)
    cpu_percent: array = field(default_factory=numbers)
    memory_used: array = field(default_factory=numbers)
    gpus: dict[int, dict[str, array]] = field(default_factory=dict)
    gpu_memory_total: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, dict[str, array]] = field(default_factory=dict)


def whole_timeline(event: Mapping[str, Any]) -> dict[str, Any]:
    """A timeline with everything in it that figures and findings read; raises where it cannot be read so."""
    spans = {
        name: [[str(span[0]), float(span[1]), float(span[2]), *span[3:]] for span in event[name]] for name in ("phases", "comm", "marks")
    }
    spans["comm"] = [[*span, None, None, None, None][:7] for span in spans["comm"]]
    busy = [[float(start), float(end)] for start, end in event["busy"]]
    exposed = {str(name): float(seconds) for name, seconds in event["exposed"].items()}
    plain = {"device": event.get("device", "cpu"), "backend": event.get("backend", ""), "left_out": int(event.get("left_out", 0))}
    moments = {"step": int(event["step"]), "t0": float(event["t0"]), "seconds": float(event["seconds"])}
    return spans | plain | moments | {"busy": busy, "exposed": exposed}
